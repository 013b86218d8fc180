"""What the teachers decide about an author's actions, and the pairs and step scores that follow."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from composer_prime.traces.pairs.actions import action_key
from composer_prime.traces.pairs.file import Pair, Record, StepScore, TeacherVote
from composer_prime.traces.pairs.votes import Collected, Consensus, Vote, Weights, consensus_of, share, supported
from composer_prime.traces.states import Message, TraceState


@dataclass(frozen=True)
class Decision:
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

    def chose(self, vote: Vote) -> Literal["chosen", "rejected", "other"]:
        """Whether a teacher is for the consensus, for the author's action, or for another."""
        if self.consensus is not None and vote.ballot.key == self.consensus.key:
            return "chosen"
        return "rejected" if vote.ballot.key == self.author_key else "other"


def decide(
    states: Iterable[TraceState], found: Collected, weights: Weights, min_support: float, min_votes: int = 2
) -> Iterator[Decision]:
    """One decision a state, in the order in which they were collected; without votes where no teacher answered."""
    for state, id in zip(states, found.ids, strict=True):
        key = action_key(state.action, state.tools, state.cwd, found.explaining)
        votes = weights.votes(found.ballots.get((id, state.cwd), ()), state.author)
        best = consensus_of(votes, min_support, min_votes)
        yield Decision(state, id, key, votes, best, supported(votes, key, min_votes))


def records_of(decisions: Iterable[Decision]) -> Iterator[Record]:
    """The score of each state that was answered, behind it its pair where the consensus differs from the author.

    A consensus of the student's or the author's family alone makes none. The same action at the same state makes one
    pair, in however many sessions it was taken.
    """
    paired: set[tuple[str, str]] = set()
    for decision in decisions:
        state, found = decision.state, decision.consensus
        if decision.score is not None:
            known = {"state": decision.id, "score": decision.score, "supported": decision.supported}
            yield StepScore(session=state.session, turn=state.turn, **known)
        if found is None or found.circular or decision.is_agreed or (decision.id, decision.author_key) in paired:
            continue
        paired.add((decision.id, decision.author_key))
        yield Pair(
            state=decision.id,
            messages=[dict(message) for message in state.messages],
            tools=[dict(tool) for tool in state.tools],
            chosen=_acted(found.action),
            rejected=_acted(state.action),
            weight=found.support,
            teachers={vote.ballot.answer.teacher: _vote(decision, vote) for vote in decision.votes},
        )


def _vote(decision: Decision, vote: Vote) -> TeacherVote:
    answer = vote.ballot.answer
    return TeacherVote(model=answer.model, weight=vote.weight, chose=decision.chose(vote), circular=vote.circular)


def _acted(action: Message) -> dict[str, Any]:
    """An action without thinking: of two, often one alone has some, and that isn't what the pair is about."""
    kept = {name: action[name] for name in ("content", "tool_calls") if action.get(name)}
    return {"role": "assistant", "content": "", **kept}
