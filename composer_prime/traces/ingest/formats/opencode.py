"""opencode's sessions, as `opencode export` writes them. Records are the messages.

An assistant's message may hold several calls of the model, each begun by a `step-start`, with their tools' results.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.messages import assistant, plain, result, tool_call
from composer_prime.traces.ingest.reading import Document, Documents
from composer_prime.traces.ingest.records import mapping, name_or_none, objects, sequence, string
from composer_prime.traces.ingest.session import Draft

NO_CONTENT = "message without content"


def _marks(value: Any) -> dict[str, bool]:
    messages = objects(sequence(mapping(value).get("messages")))
    has_parts = any("role" in mapping(message.get("info")) and "parts" in message for message in messages)
    return {"messages with info and parts": has_parts}


def _read(value: Mapping[str, Any]) -> Document:
    session = mapping(value.get("info"))
    draft = Draft(name_or_none(session.get("id")), cwd=name_or_none(session.get("directory")))
    document = Document(list(sequence(value["messages"])), drafts=[draft])
    for number, message in enumerate(document.items):
        info, parts = mapping(mapping(message).get("info")), objects(sequence(mapping(message).get("parts")))
        before = draft.at
        shown = [part for part in parts if part.get("type") in ("text", "file") and not part.get("ignored")]
        if info.get("role") == "user" and shown:
            draft.append(plain("user", shown), number)
        for step in _steps(parts) if info.get("role") == "assistant" else ():
            _add_step(draft, number, info, step)
        if draft.at == before:
            document.fates[number] = NO_CONTENT
    return document


def _steps(parts: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    steps: list[list[Mapping[str, Any]]] = [[]]
    for part in parts:
        if part.get("type") == "step-start":
            steps.append([])
        elif part.get("type") in ("text", "reasoning", "tool"):
            steps[-1].append(part)
    return [step for step in steps if step]


def _add_step(draft: Draft, number: int, info: Mapping[str, Any], step: Sequence[Mapping[str, Any]]) -> None:
    """Add a call of the model and what its tools gave."""
    tools = [(string(part.get("callID")), part, mapping(part.get("state"))) for part in step if "tool" in part]
    calls = [tool_call(call_id, part.get("tool"), state.get("input")) for call_id, part, state in tools]
    texts, thoughts = ([p for p in step if p.get("type") == kind] for kind in ("text", "reasoning"))
    thinking = "\n".join(string(part.get("text")) for part in thoughts)
    author, usage = name_or_none(info.get("modelID")), mapping(info.get("tokens")) or None
    draft.append(assistant(texts, calls, thinking), number, author=author, usage=usage)
    for call_id, _, state in tools:
        answer = state.get("output", state.get("error"))
        if answer is not None:
            draft.append(result(call_id, answer), number)


FORMAT = Documents("opencode", _marks, _read)
