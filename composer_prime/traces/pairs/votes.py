"""What the teachers say at a state, weighed and counted: one vote each, by their weights, or by these over variance."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from composer_prime.errors import BadInput
from composer_prime.traces.answers import Answer
from composer_prime.traces.pairs.actions import action_key, is_empty
from composer_prime.traces.pairs.arguments import EXPLAINING
from composer_prime.traces.pairs.families import Circularity, Kin
from composer_prime.traces.states import Message, TraceState

VoteRule: TypeAlias = Literal["plurality", "weighted", "variance"]


@dataclass(frozen=True)
class Ballot:
    """One teacher's answer and the key of its action."""

    answer: Answer
    key: str


Ballots: TypeAlias = Mapping[tuple[str, str | None], Sequence[Ballot]]
"""By a state's id and `cwd`, which may tell actions apart: the teachers that answered, in order of their names."""


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
    circular whether all who are for it share a family with the student or the author: it has no weight then
    """

    key: str
    action: Message
    support: float
    circular: bool


@dataclass(frozen=True)
class Collected:
    """The ballots, the states' ids in their order, and counts of answers that are empty or for none of the states.

    An id is the digest of all that the author saw, so it is taken once. `explaining`: see `action_key`.
    """

    ballots: Ballots
    ids: Sequence[str]
    num_empty: int
    num_elsewhere: int
    explaining: Collection[str]


def collect(
    states: Iterable[TraceState], answers: Iterable[Answer], explaining: Collection[str] = EXPLAINING
) -> Collected:
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
    ballots: dict[tuple[str, str | None], list[Ballot]] = {}
    ids: list[str] = []
    for state in states:
        ids.append(state.id)
        if ids[-1] in by_state and (ids[-1], state.cwd) not in ballots:
            by_name = sorted(by_state[ids[-1]].values(), key=lambda answer: answer.teacher)
            keys = [action_key(answer.action, state.tools, state.cwd, explaining) for answer in by_name]
            ballots[ids[-1], state.cwd] = [Ballot(*one) for one in zip(by_name, keys, strict=True)]
    elsewhere = by_state.keys() - set(ids)
    return Collected(ballots, ids, num_empty, sum(len(by_state[id]) for id in elsewhere), explaining)


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


def supported(votes: Sequence[Vote], key: str, min_votes: int = 2) -> float | None:
    """The share that is for an action, as far as the votes carry it; None where there are fewer than `min_votes`.

    It is above 0.5 only with as many votes for this action, below only with as many for one other, and not all of them
    from the student's or the author's family. Else it is 0.5.
    """
    for_one = defaultdict(list)
    for vote in votes:
        for_one[vote.ballot.key].append(vote)
    carried = {one for one, those in for_one.items() if len(those) >= min_votes and not all(v.circular for v in those)}
    score = share(votes, key) if len(votes) >= min_votes else None
    return score if score is None or carried & ({key} if score > 0.5 else for_one.keys() - {key}) else 0.5


def consensus_of(votes: Sequence[Vote], min_support: float, min_votes: int = 2) -> Consensus | None:
    """The winner; None where two lead with equal weight, or the first has too few votes or too small a share."""
    shares = {key: share(votes, key) for key in {vote.ballot.key for vote in votes}}
    lead = sorted(shares, key=lambda key: -shares[key])
    if not lead or shares[lead[0]] < min_support - 1e-9:
        return None
    if len(lead) > 1 and math.isclose(shares[lead[0]], shares[lead[1]], rel_tol=1e-9):
        return None
    backers = [vote for vote in votes if vote.ballot.key == lead[0]]
    if len(backers) < min_votes:
        return None
    best = max(backers, key=lambda vote: vote.weight)
    is_circular = all(vote.circular for vote in backers)
    return Consensus(lead[0], best.ballot.answer.action, shares[lead[0]], is_circular)
