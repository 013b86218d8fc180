"""A list of messages whose parts are blocks: Anthropic's, as Cline and Roo write them and SDKs dump them, or Gemini's
contents. A list is a session, and its records are the messages."""

from typing import Any

from composer_prime.traces.ingest.dialects.parts import has_parts
from composer_prime.traces.ingest.formats.chat import document_of
from composer_prime.traces.ingest.reading import Documents
from composer_prime.traces.ingest.records import mapping, objects, sequence


def _marks(value: Any) -> dict[str, bool]:
    given = mapping(value)
    messages = objects(sequence(given.get("messages") if given else value))
    return {
        "a list of messages, or an object with messages": any("role" in message for message in messages),
        "a message with tool_use, tool_result or thinking": any(
            has_parts(message) and not message.get("tool_calls") for message in messages if "role" in message
        ),
        "messages alone": not {"response", "choices", "trajectory_format"} & given.keys(),
    }


FORMAT = Documents("anthropic-messages", _marks, document_of)
