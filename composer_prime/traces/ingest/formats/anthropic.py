"""A list of Anthropic's messages, as Cline and Roo write them and SDKs dump them. Records are the messages."""

from collections.abc import Sequence
from typing import Any

from composer_prime.traces.ingest.formats.exchanges import anthropic_messages, either_message, has_blocks
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
        "a list of messages, or an object with messages": bool(messages),
        "a message with tool_use, tool_result or thinking": any(map(has_blocks, messages)),
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
    for number, item in enumerate(messages):
        read = anthropic_messages(mapping(item)) if has_blocks(item) else either_message(item)
        fates = []
        for message in read:
            fate = draft.refusal(at, message["tool_call_id"]) if message["role"] == "tool" else None
            if fate is None:
                author = name_or_none(mapping(item).get("model"), given.get("model"))
                at = draft.add(message, at, [number], author=author if message["role"] == "assistant" else None)
            fates.append(fate)
        if not read or all(fates):
            document.fates[number] = fates[0] if fates else NO_ROLE
    return document
