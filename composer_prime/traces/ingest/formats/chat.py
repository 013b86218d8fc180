"""OpenAI chat: a list of messages, or an object with messages (and tools, model, reward). Records are the messages."""

from collections.abc import Iterable, Mapping
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


def _marks(value: Any) -> dict[str, bool]:
    given = mapping(value)
    messages = objects(sequence(given.get("messages") if given else value))
    items = ITEMS[1:] if given else ITEMS
    is_other = any(
        (has_parts(message) and not message.get("tool_calls")) or message.get("type") in items for message in messages
    )
    is_other = is_other or bool({"response", "choices", "output", "trajectory_format"} & given.keys())
    return {
        "a list of messages, or an object with messages": bool(messages),
        "a message with a role": any(map(chat_message, messages)),
        "messages of OpenAI's chat alone": not is_other,
    }


def document_of(value: Any) -> Document:
    """A list of messages, or an object with one, as a session."""
    given = mapping(value)
    messages = sequence(given.get("messages") if given else value)
    draft = Draft(name_or_none(given.get("id"), given.get("episode_id")), tools=tools_of(given.get("tools")))
    draft.reward = number_or_none(given.get("reward"))
    document = Document(list(messages), drafts=[draft])
    if system := given.get("system", given.get("system_prompt")):
        draft.add(plain("system", system), None, ())
    add_chat(document, draft, enumerate(messages), author=name_or_none(given.get("model")))
    return document


def add_chat(document: Document, draft: Draft, messages: Iterable[tuple[int, Any]], *, author: str | None) -> None:
    """Add numbered messages to a draft, one after the other.

    A tool's message must answer a turn before it. Assistant's messages in a row are one response that was written as
    several, unless both are text alone.
    """
    at = len(draft.nodes) - 1 if draft.nodes else None
    for number, given in messages:
        fates: set[str | None] = set()
        for message in either_message(given):
            fate = draft.refusal(at, message["tool_call_id"]) if message["role"] == "tool" else None
            fates.add(fate)
            if fate is None:
                at = _add(draft, at, message, number, mapping(given), author)
        if None not in fates:
            document.fates[number] = fates.pop() or NO_ROLE if fates else NO_ROLE


def _add(
    draft: Draft, at: int | None, message: Message, number: int, given: Mapping[str, Any], author: str | None
) -> int:
    is_turn = message["role"] == "assistant"
    if (
        at is not None
        and is_turn
        and (last := draft.nodes[at]).is_turn
        and (calls_of(last.message) or calls_of(message))
    ):
        draft.replace(at, message=joined(last.message, message), records=(*last.records, number))
        return at
    more = {"author": name_or_none(given.get("model"), author)} if is_turn else {}
    return draft.add(message, at, [number], usage=mapping(given.get("usage")) or None, **more)


FORMAT = Documents("openai-chat", _marks, document_of)
