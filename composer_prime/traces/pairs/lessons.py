"""What is learned at a decision point: the action that teachers agree on, in place of the author's or as the author's.

A file of decisions names the points of a store of traces; what was seen there stands in the store alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.traces.pairs.file import Decision, read_decisions
from composer_prime.traces.states import Message, States, TraceState, digest


@dataclass(frozen=True)
class Lesson:
    """One decision point with an agreement.

    chosen    the agreed action, without thinking
    rejected  what the author did, where that is another action
    weight    the share of the teachers' weight that is for `chosen`, above 0
    """

    state: TraceState
    chosen: Message
    rejected: Message | None
    weight: float


def read_lessons(store: States, file: Path) -> Iterator[Lesson]:
    """The lessons of a file, in the store's order; the same actions at the same point of several sessions are one.

    Raises BadInput where the file can't be read, has no agreement, or is of another store.
    """
    decisions = {(one.session, one.turn): one for one in read_decisions(file) if one.support is not None}
    if not decisions:
        raise BadInput(f"{file} has no action that teachers agree on: ask more teachers, or lower --min-votes")
    told: set[str] = set()
    num_found = 0
    for state in store.states():
        decision = decisions.get((state.session, state.turn))
        if decision is None or decision.state != state.id:
            continue
        num_found += 1
        lesson = _lesson(state, decision)
        key = digest([state.id, lesson.chosen, lesson.rejected])
        if key not in told:
            told.add(key)
            yield lesson
    if not num_found:
        raise BadInput(f"none of the {len(decisions):,} agreements of {file} is of a point of the store: give its own")


def _lesson(state: TraceState, decision: Decision) -> Lesson:
    assert decision.support is not None
    own, chosen = acted(state.action), decision.chosen
    return Lesson(state, chosen or own, own if chosen else None, decision.support)


def acted(action: Message) -> dict[str, Any]:
    """An action without thinking: of two, often one alone has some, and that isn't what is taught."""
    kept = {name: action[name] for name in ("content", "tool_calls") if action.get(name)}
    return {"role": "assistant", "content": "", **kept}


def step_advantages(file: Path) -> dict[tuple[str, int], float]:
    """By session and turn, how good what the author did is, in [-1, 1]: twice the share that is for it, minus 1.

    Only where enough teachers answered.
    """
    decisions = read_decisions(file)
    return {(one.session, one.turn): 2 * one.supported - 1 for one in decisions if one.supported is not None}
