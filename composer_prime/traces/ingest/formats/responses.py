"""OpenAI Responses: a response with its input, or a list of items. Records are the items."""

from typing import Any

from composer_prime.traces.ingest.dialects.items import ITEMS, ItemFold
from composer_prime.traces.ingest.messages import plain, tools_of
from composer_prime.traces.ingest.reading import Document, Documents
from composer_prime.traces.ingest.records import mapping, name_or_none, number_or_none, sequence
from composer_prime.traces.ingest.session import Draft

ELSEWHERE = "context in another response"


def _marks(value: Any) -> dict[str, bool]:
    items = value if isinstance(value, list) else sequence(mapping(value).get("output"))
    return {
        "a list of items, or an object with output": bool(items),
        "items with a type such as message or function_call": any(mapping(item).get("type") in ITEMS for item in items),
    }


def _read(value: Any) -> Document:
    given = mapping(value)
    before = given.get("input")
    context = [{"role": "user", "content": before}] if isinstance(before, str) else sequence(before)
    items = [*context, *sequence(given.get("output") if given else value)]
    if given.get("previous_response_id"):
        return Document(items, dict.fromkeys(range(len(items)), ELSEWHERE))
    draft = Draft(name_or_none(given.get("id")), tools=tools_of(given.get("tools")))
    draft.reward = number_or_none(given.get("reward"))
    document = Document(items, drafts=[draft])
    fold = ItemFold(draft, author=name_or_none(given.get("model")))
    if instructions := name_or_none(given.get("instructions")):
        draft.append(plain("system", instructions))
    for number, item in enumerate(items):
        if number == len(context):
            fold.end_turn()
        fold.is_copied = number < len(context)
        if (fate := fold.take(item, number)) is not None:
            document.fates[number] = fate
    fold.usage = mapping(given.get("usage")) or None
    fold.finish(document.fates)
    return document


FORMAT = Documents("openai-responses", _marks, _read)
