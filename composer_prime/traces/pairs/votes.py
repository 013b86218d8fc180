"""The vote at a decision point: which teacher is for which action, with what weight, and what they agree on."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from composer_prime.traces.answers import Answer
from composer_prime.traces.pairs.actions import action_key
from composer_prime.traces.pairs.arguments import EXPLAINING
from composer_prime.traces.pairs.families import Circularity, Kin
from composer_prime.traces.states import Message, TraceState

VoteRule: TypeAlias = Literal["plurality", "weighted"]


@dataclass(frozen=True)
class Rules:
    """How votes become a consensus.

    vote         plurality: one a teacher; weighted: the answer's weight
    min_support  the least share of the weight that makes a consensus, 0 to 1
    min_votes    the least number of votes for an action that does, at least 1
    circularity  what becomes of teachers that share a family with student or author
    explaining   TOOL.ARGUMENT that don't count, see `action_key`
    """

    vote: VoteRule = "plurality"
    min_support: float = 0.5
    min_votes: int = 2
    circularity: Circularity = field(default_factory=Circularity)
    explaining: Collection[str] = EXPLAINING


@dataclass(frozen=True)
class Vote:
    """A teacher's answer with the key of its action, and its weight; `circular`: whose family its model shares."""

    answer: Answer
    key: str
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
class DecidedState:
    """One state, the votes there in the order of the teachers' names, and their consensus, if there is one."""

    state: TraceState
    author_key: str
    votes: Sequence[Vote]
    consensus: Consensus | None
    supported: float | None

    @cached_property
    def score(self) -> float | None:
        """The share of the weight that agrees with the author; None where no teacher answered."""
        return share(self.votes, self.author_key) if self.votes else None

    @property
    def is_agreed(self) -> bool:
        """Whether the consensus is what the author did."""
        return self.consensus is not None and self.consensus.key == self.author_key

    def chose(self, vote: Vote) -> Literal["agreed", "author", "other"]:
        """Whether a teacher is for the consensus, for the author's action, or for another."""
        if self.consensus is not None and vote.key == self.consensus.key:
            return "agreed"
        return "author" if vote.key == self.author_key else "other"


def decide(state: TraceState, answers: Iterable[Answer], rules: Rules) -> DecidedState:
    """What one answer a teacher decides at a state; a teacher near student or author weighs less."""
    key = action_key(state.action, state.tools, state.cwd, rules.explaining)
    votes = []
    for answer in sorted(answers, key=lambda answer: answer.teacher):
        circular = rules.circularity.shared_with(answer.model, state.author)
        weight = 1.0 if rules.vote == "plurality" else answer.weight
        weight *= rules.circularity.factor if circular else 1.0
        own = action_key(answer.action, state.tools, state.cwd, rules.explaining)
        votes.append(Vote(answer, own, weight, circular))
    best = consensus_of(votes, rules.min_support, rules.min_votes)
    return DecidedState(state, key, votes, best, supported(votes, key, rules.min_votes))


def share(votes: Sequence[Vote], key: str) -> float:
    """The share of the votes' weight that is for the action of that key; at least one vote."""
    return math.fsum(vote.weight for vote in votes if vote.key == key) / math.fsum(vote.weight for vote in votes)


def supported(votes: Sequence[Vote], key: str, min_votes: int = 2) -> float | None:
    """The share that is for an action, as far as the votes carry it; None where there are fewer than `min_votes`.

    It is above 0.5 only with as many votes for this action, below only with as many for one other, and not all of them
    from the student's or the author's family. Else it is 0.5.
    """
    for_one = defaultdict(list)
    for vote in votes:
        for_one[vote.key].append(vote)
    carried = {one for one, those in for_one.items() if len(those) >= min_votes and not all(v.circular for v in those)}
    score = share(votes, key) if len(votes) >= min_votes else None
    return score if score is None or carried & ({key} if score > 0.5 else for_one.keys() - {key}) else 0.5


def consensus_of(votes: Sequence[Vote], min_support: float, min_votes: int = 2) -> Consensus | None:
    """The winner; None where two lead with equal weight, or the first has too few votes or too small a share."""
    shares = {key: share(votes, key) for key in {vote.key for vote in votes}}
    lead = sorted(shares, key=lambda key: -shares[key])
    if not lead or shares[lead[0]] < min_support - 1e-9:
        return None
    if len(lead) > 1 and math.isclose(shares[lead[0]], shares[lead[1]], rel_tol=1e-9):
        return None
    backers = [vote for vote in votes if vote.key == lead[0]]
    if len(backers) < min_votes:
        return None
    best = max(backers, key=lambda vote: vote.weight)
    return Consensus(lead[0], best.answer.action, shares[lead[0]], all(vote.circular for vote in backers))
