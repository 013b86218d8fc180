"""ATIF, the trajectories of Harbor and Terminal-Bench, versions 1.0 to 1.8. Records are the steps.

Subagents' trajectories are trees of their own in the session."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_prime.traces.ingest.messages import assistant, content_text, plain, result, tool_call, tools_of
from composer_prime.traces.ingest.reading import Document, Documents, Reading
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, number_or_none, objects, sequence, string
from composer_prime.traces.ingest.session import Draft, Original

NO_SOURCE = "step of no known source"
_VERSION = re.compile(r"ATIF-v1\.[0-8]")
REWARD_FILES = ("verifier/reward.txt", "verifier/reward.json")
"""Where a trial's reward is, below the folder that holds its agent's."""


def _marks(value: Any) -> dict[str, bool]:
    given = mapping(value)
    return {
        "schema_version ATIF-v1.0 to ATIF-v1.8": bool(_VERSION.fullmatch(string(given.get("schema_version")))),
        "a list of steps": isinstance(given.get("steps"), list),
    }


class Trials(Documents):
    """A session a trajectory; beside it may lie the reward of its trial, which is kept with it."""

    def read(self, parts: Sequence[Part]) -> Reading:
        reading = super().read(parts)
        reward = next((_reward(part.entries[0].value) for part in parts[1:] if part.entries), None)
        beside = [Original(part.name, "".join(entry.text for entry in part.entries)) for part in parts[1:]]
        reading.sessions = [
            replace(session, reward=reward, original=(*session.original, *beside)) for session in reading.sessions
        ]
        return reading


def _reward(value: Any) -> float | None:
    """A number, or an object's `reward`, or the one number that it holds."""
    if not isinstance(value, dict):
        return number_or_none(value)
    numbers = [number for number in map(number_or_none, value.values()) if number is not None]
    return number_or_none(value.get("reward", numbers[0] if len(numbers) == 1 else None))


def _read(value: Mapping[str, Any]) -> Document:
    draft = Draft(name_or_none(value.get("trajectory_id")))  # session_id is a run's, of many
    document = Document([], drafts=[draft])
    for trajectory in _trajectories(value):
        agent = mapping(trajectory.get("agent"))
        draft.tools += [tool for tool in tools_of(agent.get("tool_definitions")) if tool not in draft.tools]
        draft.at = None
        for step in sequence(trajectory.get("steps")):
            if mapping(step).get("source") in ("system", "user", "agent"):
                _add_step(draft, len(document.items), step, name_or_none(agent.get("model_name")))
            else:
                document.fates[len(document.items)] = NO_SOURCE
            document.items.append(step)
    return document


def _trajectories(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield value
    for inner in objects(sequence(value.get("subagent_trajectories"))):
        yield from _trajectories(inner)


def _add_step(draft: Draft, number: int, step: Mapping[str, Any], model: str | None) -> None:
    """Add a step's message and what was observed after it.

    A result that names no call answers the step's only one; else it is what the user shows.
    """
    is_copied = step.get("is_copied_context") is True
    results = objects(sequence(mapping(step.get("observation")).get("results")))
    given = objects(sequence(step.get("tool_calls")))
    calls = [tool_call(call.get("tool_call_id"), call.get("function_name"), call.get("arguments")) for call in given]
    only = calls[0]["id"] if len(calls) == len(results) == 1 else ""
    if step["source"] == "agent":
        said = assistant(step.get("message"), calls, string(step.get("reasoning_content")))
        more = {"author": name_or_none(step.get("model_name"), model), "usage": mapping(step.get("metrics")) or None}
        draft.append(said, number, is_copied=is_copied, is_synthetic=step.get("llm_call_count") == 0, **more)
    else:
        draft.append(plain(step["source"], step.get("message")), number, is_copied=is_copied)
    for seen in results:
        call_id = name_or_none(seen.get("source_call_id")) or only
        answers = bool(call_id) and draft.refusal(draft.at, call_id) is None
        text = content_text(seen.get("content"))
        if answers or text:
            message = result(call_id, text) if answers else plain("user", text)
            draft.append(message, number, is_copied=is_copied)


FORMAT = Trials("atif", _marks, _read)
