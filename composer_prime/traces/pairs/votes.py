"""What the teachers say at a state, weighed and counted: one vote each, by their weights, or by these over variance."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from composer_prime.errors import BadInput
from composer_prime.traces.answers import Answer
from composer_prime.traces.pairs.actions import action_key, is_empty
from composer_prime.traces.pairs.families import Circularity, Kin
from composer_prime.traces.states import Message, TraceState

VoteRule: TypeAlias = Literal["plurality", "weighted", "variance"]


@dataclass(frozen=True)
class Ballot:
    """One teacher's answer and the key of its action."""

    answer: Answer
    key: str


Ballots: TypeAlias = Mapping[str, Sequence[Ballot]]
"""By state id: the teachers that answered there, in order of their names."""


@dataclass(frozen=True)
class Vote:
    """A ballot with its weight at a state; `circular`: whose family its model shares, if anyone's."""

    ballot: Ballot
    weight: float
    circular: Kin | None


@dataclass(frozen=True)
class Consensus:
    """The action most weight is for.

    key      its action key
    action   in the words of the weightiest teacher for it, of equal ones the first by name
    support  its share of the weight of all who answered, above 0 and at most 1
    """

    key: str
    action: Message
    support: float


@dataclass(frozen=True)
class Collected:
    """The ballots, the states' ids in their order, and counts of answers that are empty or for none of the states.

    An id is the digest of all that the author saw, so it is taken once.
    """

    ballots: Ballots
    ids: Sequence[str]
    num_empty: int
    num_elsewhere: int


def collect(states: Iterable[TraceState], answers: Iterable[Answer]) -> Collected:
    """Read the teachers' actions; one answer counts at every state of its id.

    Raises BadInput where a teacher has two answers at a state that aren't equal.
    """
    by_state: dict[str, dict[str, Answer]] = defaultdict(dict)
    num_empty = 0
    for answer in answers:
        if is_empty(answer.action):
            num_empty += 1
            continue
        known = by_state[answer.state].setdefault(answer.teacher, answer)
        if known != answer:
            raise BadInput(
                f"teacher {answer.teacher} has two answers at state {answer.state}, and a vote is one: "
                "remove one of them, or give them to teachers of two names"
            )
    ballots: dict[str, list[Ballot]] = {}
    ids: list[str] = []
    for state in states:
        ids.append(state.id)
        there = by_state.pop(ids[-1], {})
        if there:
            by_name = sorted(there.values(), key=lambda answer: answer.teacher)
            ballots[ids[-1]] = [Ballot(answer, action_key(answer.action, state.tools)) for answer in by_name]
    return Collected(ballots, ids, num_empty, sum(map(len, by_state.values())))


def disagreement_variances(ballots: Ballots) -> dict[str, float]:
    """Of each teacher: the mean square of its distance from the others, around 0, in (0, 1].

    The distance at a state is the share of the other teachers whose action is another. One state of distance 1 is added
    to each teacher's, so that a short record says little and nobody has variance 0.
    """
    squares: dict[str, list[float]] = defaultdict(lambda: [1.0])
    for there in ballots.values():
        for one in there:
            others = [other.key != one.key for other in there if other is not one]
            squares[one.answer.teacher] += [(sum(others) / len(others)) ** 2] if others else []
    return {teacher: math.fsum(values) / len(values) for teacher, values in squares.items()}


@dataclass(frozen=True)
class Weights:
    """The weight of a ballot: by the rule, times the circularity factor where it applies.

    plurality  1
    weighted   the answer's weight
    variance   the answer's weight over its teacher's disagreement variance
    """

    rule: VoteRule
    circularity: Circularity
    variances: Mapping[str, float]

    def votes(self, ballots: Sequence[Ballot], author: str | None) -> list[Vote]:
        """The votes at one state whose author's model is `author`."""
        found = []
        for ballot in ballots:
            answer = ballot.answer
            weight = 1.0 if self.rule == "plurality" else answer.weight
            weight /= self.variances[answer.teacher] if self.rule == "variance" else 1.0
            circular = self.circularity.shared_with(answer.model, author)
            found.append(Vote(ballot, weight * (self.circularity.factor if circular else 1.0), circular))
        return found


def share(votes: Sequence[Vote], key: str) -> float:
    """The share of the votes' weight that is for the action of that key; at least one vote."""
    for_it = math.fsum(vote.weight for vote in votes if vote.ballot.key == key)
    return for_it / math.fsum(vote.weight for vote in votes)


def consensus_of(votes: Sequence[Vote], min_support: float) -> Consensus | None:
    """The winner; None without votes, where two lead with equal weight, or where its share is below `min_support`."""
    shares = {key: share(votes, key) for key in {vote.ballot.key for vote in votes}}
    lead = sorted(shares, key=lambda key: -shares[key])
    if not lead or shares[lead[0]] < min_support - 1e-9:
        return None
    if len(lead) > 1 and math.isclose(shares[lead[0]], shares[lead[1]], rel_tol=1e-9):
        return None
    backers = [vote for vote in votes if vote.ballot.key == lead[0]]
    best = max(backers, key=lambda vote: vote.weight)
    return Consensus(lead[0], best.ballot.answer.action, shares[lead[0]])
