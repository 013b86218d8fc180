"""OpenEnv's TrainingTrace: turns that hold a request and its response as they were sent. Records are the turns.

The dialects are chat completions, Responses and Anthropic's messages. Token ids and their logprobs are not read here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.formats.items import ItemFold
from composer_prime.traces.ingest.formats.requests import RequestTree
from composer_prime.traces.ingest.messages import assistant, chat_message, plain, result, tool_call, tools_of
from composer_prime.traces.ingest.reading import Document, Reading, read_documents
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, objects, sequence, string
from composer_prime.traces.ingest.session import Draft
from composer_prime.traces.states import Message

NAME = "openenv"
NO_DIALECT = "turn in a dialect that isn't read"


def lacks(value: Any) -> list[str]:
    """What a JSON value lacks to be a TrainingTrace."""
    given = mapping(value)
    checks = {
        "schema_version 1": given.get("schema_version") == 1,
        "turns with request and response": any("request" in turn for turn in objects(sequence(given.get("turns")))),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """One session a trace."""
    return read_documents(NAME, parts, lacks, _read)


def _read(value: Mapping[str, Any]) -> Document:
    turns = sequence(value.get("turns"))
    draft = Draft()
    document = Document(list(turns), drafts=[draft])
    tree = RequestTree(draft)
    for number, turn in enumerate(map(mapping, turns)):
        request, response = mapping(turn.get("request")), mapping(turn.get("response"))
        action = _action(response)
        if action is None:
            document.fates[number] = NO_DIALECT
            continue
        at = tree.follow(_messages(request), number)
        author = name_or_none(response.get("model"), request.get("model"))
        tree.act(action, at, number, author=author, usage=mapping(response.get("usage")) or None)
        draft.tools += [tool for tool in tools_of(request.get("tools")) if tool not in draft.tools]
    return document


def _messages(request: Mapping[str, Any]) -> list[Message]:
    system = name_or_none(request.get("instructions"), request.get("system"))
    if system is None and (blocks := sequence(request.get("system"))):
        system = "\n".join(string(block.get("text")) for block in objects(blocks))
    found: list[Message] = [] if system is None else [plain("system", system)]
    if "input" in request:
        return found + _items(request["input"])
    for given in objects(sequence(request.get("messages"))):
        found += _anthropic(given) if _has_blocks(given) else [m for m in [chat_message(given)] if m is not None]
    return found


def _action(response: Mapping[str, Any]) -> Message | None:
    """What the response says, in whichever dialect; None: in none of them."""
    for choice in objects(sequence(response.get("choices"))):
        return chat_message({**mapping(choice.get("message")), "role": "assistant"})
    if isinstance(response.get("output"), list):
        said = _items(response["output"])
        return said[-1] if said else None
    if isinstance(response.get("content"), list):
        return next(iter(_anthropic({"role": "assistant", "content": response["content"]})), None)
    return None


def _items(items: Any) -> list[Message]:
    """Responses' items as messages."""
    fold = ItemFold(Draft())
    for number, item in enumerate([{"role": "user", "content": items}] if isinstance(items, str) else sequence(items)):
        fold.take(item, number)
    fold.finish({})
    return [node.message for node in fold.draft.nodes]


def _has_blocks(given: Mapping[str, Any]) -> bool:
    kinds = {string(block.get("type")) for block in objects(sequence(given.get("content")))}
    return bool(kinds & {"tool_use", "tool_result", "thinking"})


def _anthropic(given: Mapping[str, Any]) -> list[Message]:
    """One of Anthropic's messages: an assistant's, or tools' results and what the user says after them."""
    blocks = objects(sequence(given.get("content")))
    if given.get("role") == "assistant":
        thinking = "\n".join(string(block.get("thinking")) for block in blocks if block.get("type") == "thinking")
        calls = [tool_call(b.get("id"), b.get("name"), b.get("input")) for b in blocks if b.get("type") == "tool_use"]
        shown = [block for block in blocks if block.get("type") not in ("thinking", "redacted_thinking", "tool_use")]
        return [assistant(shown, calls, thinking)]
    answers = [block for block in blocks if block.get("type") == "tool_result"]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    results = [result(string(block.get("tool_use_id")), block.get("content")) for block in answers]
    return [*results, plain("user", rest)] if rest else results
