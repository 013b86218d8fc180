"""What the teachers decide at each point, and the records that follow."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from composer_prime.traces.pairs.actions import action_key
from composer_prime.traces.pairs.file import Decision, TeacherVote
from composer_prime.traces.pairs.votes import Collected, Consensus, Vote, Weights, consensus_of, share, supported
from composer_prime.traces.states import Message, TraceState


@dataclass(frozen=True)
class DecidedState:
    """One state with its id, the votes there, and their consensus, if there is one."""

    state: TraceState
    id: str
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
        if self.consensus is not None and vote.ballot.key == self.consensus.key:
            return "agreed"
        return "author" if vote.ballot.key == self.author_key else "other"


def decide(
    states: Iterable[TraceState], found: Collected, weights: Weights, min_support: float, min_votes: int = 2
) -> Iterator[DecidedState]:
    """One decision a state, in the order in which they were collected; without votes where no teacher answered."""
    for state, id in zip(states, found.ids, strict=True):
        key = action_key(state.action, state.tools, state.cwd, found.explaining)
        votes = weights.votes(found.ballots.get((id, state.cwd), ()), state.author)
        best = consensus_of(votes, min_support, min_votes)
        yield DecidedState(state, id, key, votes, best, supported(votes, key, min_votes))


def decisions_of(states: Iterable[DecidedState]) -> Iterator[Decision]:
    """The record of each state that was answered. What the student's or author's family alone is for isn't agreed."""
    for decided in states:
        if decided.score is None:
            continue
        found = None if decided.consensus is None or decided.consensus.circular else decided.consensus
        yield Decision(
            session=decided.state.session,
            turn=decided.state.turn,
            state=decided.id,
            score=decided.score,
            supported=decided.supported,
            support=None if found is None else found.support,
            chosen=None if found is None or decided.is_agreed else acted(found.action),
            teachers={vote.ballot.answer.teacher: _vote(decided, vote) for vote in decided.votes},
        )


def _vote(decided: DecidedState, vote: Vote) -> TeacherVote:
    answer = vote.ballot.answer
    return TeacherVote(model=answer.model, weight=vote.weight, chose=decided.chose(vote), circular=vote.circular)


def acted(action: Message) -> dict[str, Any]:
    """An action without thinking: of two, often one alone has some, and that isn't what is taught."""
    kept = {name: action[name] for name in ("content", "tool_calls") if action.get(name)}
    return {"role": "assistant", "content": "", **kept}
