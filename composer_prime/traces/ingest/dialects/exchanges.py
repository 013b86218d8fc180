"""Calls of a model as its API was asked: a request's messages and tools, and the action in the response.

The dialects are OpenAI's chat completions and Responses, Anthropic's messages, Gemini's contents, and those of
instruments that log them. Requests repeat their history: what two of them share is one path of the tree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_prime.traces.ingest.dialects.items import ITEMS, ItemFold
from composer_prime.traces.ingest.dialects.parts import either_message, part_messages
from composer_prime.traces.ingest.dialects.streams import assembled, events_of
from composer_prime.traces.ingest.messages import assistant, plain, tools_of
from composer_prime.traces.ingest.reading import Document, Format, Reading
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, objects, parse, sequence
from composer_prime.traces.ingest.session import Draft
from composer_prime.traces.states import Message, Tool, calls_of, digest


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
    action = action_of(response)
    if action is None:
        return None
    tools = tools_of(asked.get("tools") or mapping(asked.get("config")).get("tools"))
    author, usage = name_or_none(answered.get("model"), asked.get("model")), mapping(answered.get("usage")) or None
    return Exchange(messages_of(request), action, tools, author, usage, name_or_none(answered.get("id")))


@dataclass(frozen=True)
class Calls(Format):
    """A format whose records are calls of a model: a session for each list of tools that a file's calls have.

    items     the records of a JSON value
    exchange  an item's call, or why it holds none
    """

    items: Callable[[Any], Sequence[Any]]
    exchange: Callable[[Mapping[str, Any]], Exchange | str]

    def read(self, parts: Sequence[Part]) -> Reading:
        reading, document = Reading(), Document([])
        owners: list[int] = []
        for number, entry in enumerate(parts[0].entries):
            if problem := self.problem(entry):
                document.fates[len(owners)] = problem
            items = [None] if problem else self.items(entry.value)
            document.items += items
            owners += [number] * len(items)
        trees: dict[str, RequestTree] = {}
        for number, item in enumerate(document.items):
            found = document.fates.get(number) or self.exchange(mapping(item))
            if isinstance(found, str):
                document.fates[number] = found
                continue
            tree = trees.setdefault(digest(list(found.tools)), RequestTree(Draft(tools=list(found.tools))))
            about = {"author": found.author, "usage": found.usage, "call": found.call}
            tree.add(found.messages, found.action, number, **about)
        document.drafts = [tree.draft for tree in trees.values()]
        reading.add(self.name, document, [("", entry) for entry in parts[0].entries], owners)
        return reading


@dataclass
class RequestTree:
    """Adds requests and what came of them to a draft."""

    draft: Draft
    _places: dict[tuple[int | None, str], int] = field(default_factory=dict)

    def add(self, shown: Iterable[Message], action: Message, record: int, **more: Any) -> None:
        """Add what a request showed that is new, assistant's messages as copies, and what the model answered.

        Where a request that was read before shows the answer already, that copy becomes it; so does the same answer
        that another instrument has logged. `more` are fields of the answer's node.
        """
        at: int | None = None
        for message in shown:
            key = (at, _key(message))
            if key not in self._places:
                self._places[key] = self.draft.add(message, at, [record], is_copied=message["role"] == "assistant")
            at = self._places[key]
        key = (at, _key(action))
        known = self._places.get(key)
        if known is not None and self.draft.nodes[known].is_copied:
            self.draft.replace(known, record, message=action, is_copied=False, **more)
        elif known is not None and more.get("call") in (None, self.draft.nodes[known].call):
            self.draft.replace(known, record)
        else:
            self._places.setdefault(key, self.draft.add(action, at, [record], **more))


def _key(message: Message) -> str:
    """Requests may show a message without its thinking."""
    return digest({name: value for name, value in message.items() if name != "reasoning_content"})


def loaded(value: Any) -> Any:
    """What a JSON text says, a stream's events put together; any other value as it is."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse(value)
    except (ValueError, RecursionError):
        return assembled(events_of(value)) or value


def messages_of(request: Any) -> list[Message]:
    """A request's messages in whichever dialect, its system's first; of a list or a text alone, what it says."""
    given = mapping(request)
    if not given:
        return said(request)
    config = mapping(given.get("config"))
    names = ("instructions", "system", "system_instruction", "systemInstruction")
    system = next((holds[name] for holds in (given, config) for name in names if holds.get(name)), None)
    found: list[Message] = [plain("system", mapping(system).get("parts", system))] if system else []
    places = ("messages", "input", "contents", "prompt", "prompts", "args")
    place = next((name for name in places if given.get(name) is not None), None)
    body = given if place is None else given[place]
    if place == "messages" and any(isinstance(message, str) for message in sequence(body)):
        return []  # Python's own spelling of objects
    return found + said(body)


def said(value: Any) -> list[Message]:
    """The messages of a list of messages or of Responses' items; a text is a user's."""
    if isinstance(value, str):
        return [plain("user", value)]
    given = sequence(value) or objects([value])
    given = sequence(given[0]) if len(given) == 1 and isinstance(given[0], list) else given  # LangChain's batch
    if any(mapping(item).get("type") in ITEMS[1:] for item in given):
        return items_of(given)
    if len(given) == 1 and isinstance(given[0], str):
        return [plain("user", given[0])]
    return [message for item in given for message in either_message(item)]


def action_of(response: Any) -> Message | None:
    """What a response says, in whichever dialect; None: in none of them."""
    if isinstance(response, str):
        return assistant(response) if response.strip() else None
    given = mapping(response)
    if isinstance(response, list) or isinstance(given.get("output"), list):
        items = [{"type": "tool-call", **item} if "toolName" in item else item for item in objects(sequence(response))]
        is_told = any("role" in item for item in items)
        content: Mapping[str, Any] = {"role": "assistant", "content": items}
        found = items_of(given["output"]) if given else said(items) if is_told else part_messages(content)
        turns = [message for message in found if message["role"] == "assistant"]
        return joined(*turns) if turns else None
    for choice in objects(sequence(given.get("choices", given.get("candidates")))):
        inner = mapping(choice.get("message", choice.get("content")))
        return either_message({**inner, "role": "assistant"})[0] if inner else None
    for generation in objects(sequence(next(iter(sequence(given.get("generations"))), None))):
        return action_of(generation.get("message", generation.get("text")))
    for name in ("message", "content"):
        if isinstance(given.get(name), dict):
            return action_of(given[name])
    if {"content", "parts", "tool_calls", "kwargs"} & given.keys():
        message = next(iter(either_message({"role": "assistant", **given})), None)
        return message if message is not None and message["role"] == "assistant" else None
    return None


def joined(*messages: Message) -> Message:
    """An assistant's messages of one response as one."""
    names = ("content", "reasoning_content")
    text, thinking = ("\n".join(filter(None, (message.get(name) for message in messages))) for name in names)
    return assistant(text, [call for message in messages for call in calls_of(message)], thinking)


def items_of(items: Sequence[Any]) -> list[Message]:
    """Responses' items as messages."""
    fold = ItemFold(Draft())
    for number, item in enumerate(items):
        fold.take(item, number)
    fold.end_turn()
    return [node.message for node in fold.draft.nodes]
