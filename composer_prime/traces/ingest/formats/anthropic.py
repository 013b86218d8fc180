"""A list of messages whose parts are blocks: Anthropic's, as Cline and Roo write them and SDKs dump them, or Gemini's
contents. Records are the messages."""

from collections.abc import Sequence
from typing import Any

from composer_prime.traces.ingest.formats.parts import either_message, has_parts
from composer_prime.traces.ingest.messages import plain, tools_of
from composer_prime.traces.ingest.reading import Document, Reading, read_documents
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, objects, sequence
from composer_prime.traces.ingest.session import Draft

NAME = "anthropic-messages"
NO_ROLE = "message of no known role"


def lacks(value: Any) -> list[str]:
    """What a JSON value lacks to be such a list, or an object with one."""
    given = mapping(value)
    messages = objects(sequence(given.get("messages") if given else value))
    checks = {
        "a list of messages, or an object with messages": any("role" in message for message in messages),
        "a message with tool_use, tool_result or thinking": any(
            has_parts(message) and not message.get("tool_calls") for message in messages if "role" in message
        ),
        "messages alone": not {"response", "choices", "trajectory_format"} & given.keys(),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """One session a list."""
    return read_documents(NAME, parts, lacks, _read)


def _read(value: Any) -> Document:
    given = mapping(value)
    messages = sequence(given.get("messages") if given else value)
    draft = Draft(name_or_none(given.get("id")), tools=tools_of(given.get("tools")))
    document = Document(list(messages), drafts=[draft])
    at = draft.add(plain("system", given["system"]), None, ()) if given.get("system") else None
    author = name_or_none(given.get("model"))
    for number, item in enumerate(messages):
        read = either_message(item)
        fates = []
        for message in read:
            fate = draft.refusal(at, message["tool_call_id"]) if message["role"] == "tool" else None
            if fate is None:
                writer = name_or_none(mapping(item).get("model"), author) if message["role"] == "assistant" else None
                at = draft.add(message, at, [number], author=writer)
            fates.append(fate)
        if not read or all(fates):
            document.fates[number] = fates[0] if fates else NO_ROLE
    return document
