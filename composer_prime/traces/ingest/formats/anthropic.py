"""A list of messages whose parts are blocks: Anthropic's, as Cline and Roo write them and SDKs dump them, or Gemini's
contents. Records are the messages."""

from collections.abc import Sequence
from typing import Any

from composer_prime.traces.ingest.dialects.parts import has_parts
from composer_prime.traces.ingest.formats.chat import document_of
from composer_prime.traces.ingest.reading import Reading, read_documents
from composer_prime.traces.ingest.records import Part, mapping, objects, sequence

NAME = "anthropic-messages"


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
    return read_documents(NAME, parts, lacks, document_of)
