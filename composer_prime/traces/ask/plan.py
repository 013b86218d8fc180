"""Which decision points are asked about, and how long they are; made in one pass, without holding what they say."""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.errors import BadInput
from composer_prime.traces.ask.questions import key_of, sampling_id
from composer_prime.traces.states import Shared, States, TraceState, calls_of, canonical, said

BYTES_PER_TOKEN = 4
"""Of English and code."""

MESSAGE_TOKENS = 8
"""Of a chat template around a message: its role, and where it begins and ends."""


Count = Callable[[Sequence[object]], int]
"""Tokens of messages and tools."""


class Point(NamedTuple):
    """A decision point's sizes: bytes of what is asked, its tokens, and bytes of what the author did."""

    num_bytes: int
    num_tokens: int
    action_bytes: int


@dataclass(frozen=True)
class Choice:
    """Which decision points are asked about; None: all.

    tool               only those where the author called it
    max_prompt_tokens  none with more
    sample             so many, drawn by `seed`
    limit              the first so many of those that are left
    """

    tool: str | None = None
    max_prompt_tokens: int | None = None
    sample: int | None = None
    seed: int = 0
    limit: int | None = None


@dataclass
class Plan:
    """What a run is about.

    points    those that are asked about, by `TraceState.question` in bytes, in the order of the store
    left_out  distinct decision points that aren't, by reason
    about     "about " where tokens are counted by bytes
    """

    about: str = ""
    points: dict[bytes, Point] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def states(self, store: States) -> Iterator[TraceState]:
        """The decision points that are asked about, each once."""
        return (state for question, state in _distinct(store) if question in self.points)

    def by_key(self, teacher: TextTeacher) -> dict[str, Point]:
        """The decision points by the keys of their questions to a teacher."""
        sampling = sampling_id(teacher)
        return {key_of(sampling, question.hex()): point for question, point in self.points.items()}

    def left(self, teacher: TextTeacher, kept: Container[str]) -> list[Point]:
        """The decision points of which no question to this teacher has one of these keys."""
        return [point for key, point in self.by_key(teacher).items() if key not in kept]

    def heading(self) -> str:
        """How many there are, and how many aren't asked about, and why."""
        left_out = [f"{n} more left out: {why}" for why, n in self.left_out.items() if n]
        return ", ".join([f"{len(self.points)} decision points", *left_out])

    def too_long(self, seq_len: int) -> str:
        """How many don't fit the policy with their actions. Raises BadInput where none does."""
        long = [p for p in self.points.values() if p.num_tokens + p.action_bytes // BYTES_PER_TOKEN > seq_len]
        if len(long) == len(self.points):
            raise BadInput(
                f"all {len(long)} decision points are longer than --seq-len ({seq_len}): nothing would be learned of "
                "them, so raise seq_len in the recipe"
            )
        share = sum(point.num_tokens for point in long) / max(sum(p.num_tokens for p in self.points.values()), 1)
        return (
            f"{len(long)} of {len(self.points)} ({len(long) / len(self.points):.0%}) are longer than "
            f"{self.about}{seq_len} tokens, with {share:.0%} of all prompt tokens: --max-prompt-tokens leaves them out"
        )


def make_plan(store: States, choice: Choice | None = None, model: str | None = None) -> Plan:
    """Read the store once. `model`: a folder or a Hugging Face id, whose tokenizer counts.

    Raises BadInput where nothing is left.
    """
    choice = choice or Choice()
    plan, count = Plan("about " if model is None else ""), None if model is None else token_count(model)
    for question, state in _distinct(store):
        point = _point(state, count)
        if choice.tool is not None and choice.tool not in {call["function"]["name"] for call in calls_of(state.action)}:
            plan.left_out[f"--only tool={choice.tool}"] += 1
        elif choice.max_prompt_tokens is not None and point.num_tokens > choice.max_prompt_tokens:
            plan.left_out[f"--max-prompt-tokens {choice.max_prompt_tokens}"] += 1
        else:
            plan.points[question] = point
    if choice.sample is not None:
        drawn = heapq.nsmallest(choice.sample, plan.points, lambda q: hashlib.sha256(b"%d " % choice.seed + q).digest())
        _keep(plan, drawn, f"--sample {choice.sample}")
    if choice.limit is not None:
        _keep(plan, list(plan.points)[: choice.limit], f"--limit {choice.limit}")
    if not plan.points:
        raise BadInput(f"{plan.heading()}: nothing is left to ask about")
    return plan


def token_count(model: str) -> Count:
    """Counts prompts' tokens, of each message by the model's tokenizer. Raises BadInput."""
    from tokenizers import Tokenizer

    try:
        local = Path(model).expanduser() / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(local)) if local.is_file() else Tokenizer.from_pretrained(model)
    except Exception as error:  # the library raises nothing narrower
        raise BadInput(
            f"--model ({model}) has no tokenizer.json that can be read ({error}): leave it out to count by bytes"
        ) from None

    def measure(part: object) -> tuple[int, int]:
        text = canonical(part)
        return len(tokenizer.encode(text, add_special_tokens=False).ids) + MESSAGE_TOKENS, len(text)

    measured = Shared(measure, lambda found: found[1])
    return lambda parts: sum(measured(part)[0] for part in parts)


def _distinct(store: States) -> Iterator[tuple[bytes, TraceState]]:
    """The decision points by `TraceState.question` in bytes, each once."""
    seen: set[bytes] = set()
    for state in store.states():
        if (question := bytes.fromhex(state.question)) not in seen:
            seen.add(question)
            yield question, state


def _point(state: TraceState, count: Count | None) -> Point:
    parts = (*state.messages, *state.tools)
    num_bytes = sum(said(part).num_bytes + 1 for part in parts)
    num_tokens = num_bytes // BYTES_PER_TOKEN if count is None else count(parts)
    return Point(num_bytes, num_tokens, said(state.action).num_bytes)


def _keep(plan: Plan, questions: Iterable[bytes], why: str) -> None:
    kept = set(questions)
    plan.left_out[why] += len(plan.points) - len(kept)
    plan.points = {question: point for question, point in plan.points.items() if question in kept}
