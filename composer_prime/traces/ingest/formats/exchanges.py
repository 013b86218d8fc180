"""Calls of a model as its API was asked: a request's messages and tools, and the action in the response.

The dialects are OpenAI's chat completions and Responses, and Anthropic's messages. Requests repeat their history: what
two of them share is one path of the tree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_prime.traces.ingest.formats.items import ItemFold
from composer_prime.traces.ingest.messages import assistant, chat_message, plain, result, tool_call, tools_of
from composer_prime.traces.ingest.reading import Document
from composer_prime.traces.ingest.records import mapping, name_or_none, objects, sequence, string
from composer_prime.traces.ingest.session import Draft
from composer_prime.traces.states import Message, Tool, digest

BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use")
"""Parts that only Anthropic's messages have."""


@dataclass(frozen=True)
class Exchange:
    """One call of a model.

    messages  of the request, oldest first
    action    the assistant's message that came back
    tools     of the request; none: it had none, or the log doesn't say
    author    name of the model
    usage     tokens as the API counts them
    call      the provider's name for the call
    """

    messages: Sequence[Message]
    action: Message
    tools: Sequence[Tool] = ()
    author: str | None = None
    usage: Mapping[str, Any] | None = None
    call: str | None = None


def exchange_of(request: Any, response: Any) -> Exchange | None:
    """A request and its response in one of the dialects; None: the response is in none of them."""
    asked, answered = mapping(request), mapping(response)
    action = action_of(answered)
    if action is None:
        return None
    return Exchange(
        messages_of(asked),
        action,
        tools_of(asked.get("tools")),
        name_or_none(answered.get("model"), asked.get("model")),
        mapping(answered.get("usage")) or None,
        name_or_none(answered.get("id")),
    )


def add_exchanges(document: Document, items: Iterable[tuple[int, Any]], read: Callable[[Any], Exchange | str]) -> None:
    """Add the calls that numbered items of a document hold: one session for each list of tools.

    read  gives the call, or why the item holds none
    """
    trees: dict[str, RequestTree] = {}
    for number, item in items:
        found = read(item)
        if isinstance(found, str):
            document.fates[number] = found
            continue
        key = digest(list(found.tools))
        if key not in trees:
            trees[key] = RequestTree(Draft(tools=list(found.tools)))
            document.drafts.append(trees[key].draft)
        at = trees[key].follow(found.messages, number)
        trees[key].act(found.action, at, number, author=found.author, usage=found.usage, call=found.call)


@dataclass
class RequestTree:
    """Adds requests and what came of them to a draft."""

    draft: Draft
    _places: dict[tuple[int | None, str], int] = field(default_factory=dict)

    def follow(self, messages: Iterable[Message], record: int) -> int | None:
        """The node at the end of a request's messages. Those that are new are added, assistant's ones as copies."""
        at: int | None = None
        for message in messages:
            key = (at, _key(message))
            if key not in self._places:
                self._places[key] = self.draft.add(message, at, [record], is_copied=message["role"] == "assistant")
            at = self._places[key]
        return at

    def act(self, message: Message, at: int | None, record: int, **more: Any) -> int:
        """Add what a model answered after the node `at`; later requests find it there."""
        node = self.draft.add(message, at, [record], **more)
        self._places.setdefault((at, _key(message)), node)
        return node


def _key(message: Message) -> str:
    """Requests may show a message without its thinking."""
    return digest({name: value for name, value in message.items() if name != "reasoning_content"})


def messages_of(request: Mapping[str, Any]) -> list[Message]:
    """A request's messages, its system's first."""
    system = request.get("instructions", request.get("system"))
    found: list[Message] = [plain("system", system)] if system else []
    if "input" in request:
        return found + items_of(request["input"])
    return found + [message for given in sequence(request.get("messages")) for message in either_message(given)]


def action_of(response: Mapping[str, Any]) -> Message | None:
    """What a response says, in whichever dialect; None: in none of them."""
    for choice in objects(sequence(response.get("choices"))):
        if isinstance(choice.get("message"), dict):
            return chat_message({**choice["message"], "role": "assistant"})
    if isinstance(response.get("output"), list):
        said = [message for message in items_of(response["output"]) if message["role"] == "assistant"]
        return said[-1] if said else None
    if isinstance(response.get("content"), list) and response.get("role", "assistant") == "assistant":
        return next(iter(anthropic_messages({"role": "assistant", "content": response["content"]})), None)
    return None


def either_message(given: Any) -> list[Message]:
    """A message of chat completions or of Anthropic's; none where it has no role that a chat knows."""
    if has_blocks(given):
        return anthropic_messages(mapping(given))
    message = chat_message(given)
    return [] if message is None else [message]


def items_of(items: Any) -> list[Message]:
    """Responses' items as messages."""
    fold = ItemFold(Draft())
    for number, item in enumerate([{"role": "user", "content": items}] if isinstance(items, str) else sequence(items)):
        fold.take(item, number)
    fold.finish({})
    return [node.message for node in fold.draft.nodes]


def has_blocks(given: Any) -> bool:
    """Whether a message has parts that only Anthropic's messages have."""
    return any(block.get("type") in BLOCKS for block in objects(sequence(mapping(given).get("content"))))


def anthropic_messages(given: Mapping[str, Any]) -> list[Message]:
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
