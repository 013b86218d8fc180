"""A list of messages, or an object with messages (and tools, model, reward): a session, whose records are the messages.

They are those of OpenAI's chat; or their parts are blocks: Anthropic's, as Cline and Roo write them and SDKs dump them,
or Gemini's contents.
"""

from collections.abc import Mapping
from typing import Any

from composer_prime.traces.ingest.dialects.exchanges import joined
from composer_prime.traces.ingest.dialects.items import ITEMS
from composer_prime.traces.ingest.dialects.parts import either_message, has_parts
from composer_prime.traces.ingest.messages import chat_message, plain, tools_of
from composer_prime.traces.ingest.reading import Document, Documents
from composer_prime.traces.ingest.records import mapping, name_or_none, number_or_none, objects, sequence
from composer_prime.traces.ingest.session import Draft
from composer_prime.traces.states import Message, calls_of

NO_ROLE = "message of no known role"
_LISTED = "a list of messages, or an object with messages"


def _listed(value: Any) -> list[Any]:
    return list(sequence(value if isinstance(value, list) else mapping(value).get("messages")))


def _has_blocks(message: Mapping[str, Any]) -> bool:
    return has_parts(message) and not message.get("tool_calls")


def _marks(value: Any) -> dict[str, bool]:
    given, messages = mapping(value), objects(_listed(value))
    items = ITEMS[1:] if given else ITEMS
    is_other = any(_has_blocks(message) or message.get("type") in items for message in messages)
    is_other = is_other or bool({"response", "choices", "output", "trajectory_format"} & given.keys())
    return {
        _LISTED: bool(messages),
        "a message with a role": any(map(chat_message, messages)),
        "messages of OpenAI's chat alone": not is_other,
    }


def _block_marks(value: Any) -> dict[str, bool]:
    messages = [message for message in objects(_listed(value)) if "role" in message]
    return {
        _LISTED: bool(messages),
        "a message with tool_use, tool_result or thinking": any(map(_has_blocks, messages)),
        "messages alone": not {"response", "choices", "trajectory_format"} & mapping(value).keys(),
    }


def _read(value: Any) -> Document:
    given = mapping(value)
    draft = Draft(name_or_none(given.get("id"), given.get("episode_id")), tools=tools_of(given.get("tools")))
    draft.reward = number_or_none(given.get("reward"))
    document = Document(_listed(value), drafts=[draft])
    if system := given.get("system", given.get("system_prompt")):
        draft.append(plain("system", system))
    add_chat(document, draft, author=name_or_none(given.get("model")))
    return document


def add_chat(document: Document, draft: Draft, *, author: str | None) -> None:
    """Add a document's items, which are messages, to a draft, one after the other.

    A tool's message must answer a turn before it. Assistant's messages in a row are one response that was written as
    several, unless both are text alone.
    """
    for number, given in enumerate(document.items):
        fates = [_add(draft, message, number, mapping(given), author) for message in either_message(given)]
        if None not in fates:
            document.fates[number] = next(filter(None, fates), NO_ROLE)


def _add(draft: Draft, message: Message, number: int, given: Mapping[str, Any], author: str | None) -> str | None:
    """Add a message; why it can't stand there, if it can't."""
    if message["role"] == "tool":
        return draft.answer(message["tool_call_id"], message["content"], number)
    is_turn = message["role"] == "assistant"
    last = None if draft.at is None else draft.nodes[draft.at]
    if draft.at is not None and last and is_turn and last.is_turn and (calls_of(last.message) or calls_of(message)):
        return draft.replace(draft.at, number, message=joined(last.message, message))
    author = name_or_none(given.get("model"), author) if is_turn else None
    return draft.append(message, number, author=author, usage=mapping(given.get("usage")) or None)


CHAT = Documents("openai-chat", _marks, _read)
BLOCKS = Documents("anthropic-messages", _block_marks, _read)
