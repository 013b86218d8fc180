"""SWE-agent's .traj, before and since 1.1, and mini-swe-agent's. Records are the steps, or the mini's messages.

A step says what the model was shown: `query` since 1.1; in 1.0 `messages`, which end with the step itself. Where a
history processor changed it, the step is a branch of its own. Else there is the `history`; its messages are the
records where a file holds nothing else.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.dialects.exchanges import RequestTree
from composer_prime.traces.ingest.formats.chat import add_chat
from composer_prime.traces.ingest.messages import assistant, chat_message, content_text
from composer_prime.traces.ingest.reading import Document, Documents
from composer_prime.traces.ingest.records import mapping, name_or_none, objects, sequence, string
from composer_prime.traces.ingest.session import Draft, arguments_of
from composer_prime.traces.states import Message

NO_RESPONSE = "step without a response"
NO_CONTEXT = "step that doesn't say what the model was shown"


def _marks(value: Any) -> dict[str, bool]:
    given = mapping(value)
    if string(given.get("trajectory_format")).startswith("mini-swe-agent"):
        return {"messages": isinstance(given.get("messages"), list)}
    has_steps = any("action" in step and "observation" in step for step in objects(sequence(given.get("trajectory"))))
    has_history = any("role" in message and "agent" in message for message in objects(sequence(given.get("history"))))
    return {"a trajectory of steps with action and observation, or their history": has_steps or has_history}


def _read(value: Mapping[str, Any]) -> Document:
    if "trajectory_format" in value:
        return _read_messages(value, "messages")
    return _read_steps(value) if "trajectory" in value else _read_messages(value, "history")


def _read_messages(value: Mapping[str, Any], name: str) -> Document:
    messages = sequence(value.get(name))
    config = mapping(mapping(value.get("info")).get("config"))
    author = name_or_none(mapping(config.get("model")).get("model_name"))
    draft = Draft()
    document = Document(list(messages), drafts=[draft])
    add_chat(document, draft, author=author)
    for number, node in enumerate(draft.nodes):
        response = mapping(mapping(mapping(messages[node.records[0]]).get("extra")).get("response"))
        if node.is_turn and response:
            author = name_or_none(response.get("model"), node.author)
            draft.replace(number, author=author, usage=mapping(response.get("usage")) or None)
        draft.replace(number, is_copied=mapping(messages[node.records[0]]).get("is_demo") is True)
    return document


def _read_steps(value: Mapping[str, Any]) -> Document:
    steps = [mapping(step) for step in sequence(value.get("trajectory"))]
    history = sequence(value.get("history"))
    draft = Draft()
    document = Document(list(steps), drafts=[draft])
    tree = RequestTree(draft)
    model = mapping(mapping(arguments_of(string(value.get("replay_config"))).get("agent")).get("model"))
    told = 0
    for number, step in enumerate(steps):
        own = _own(history, step, range(told, len(history)))
        told = told if own is None else own + 1
        shown, action = _context(step, history, own)
        if action is None:
            document.fates[number] = NO_RESPONSE
        elif not shown:
            document.fates[number] = NO_CONTEXT
        else:
            tree.add(shown, action, number, author=name_or_none(model.get("name")))
    return document


def _context(step: Mapping[str, Any], history: Sequence[Any], own: int | None) -> tuple[list[Message], Message | None]:
    """What a step was shown, and what the model did; None: nothing.

    own  the place of the step's message in the trajectory's history
    """
    said = name_or_none(step.get("response"), step.get("thought"))
    after = sequence(step.get("messages"))  # of 1.0: those after the step, with what it did and saw at their end
    place = _own(after, step, reversed(range(len(after))))
    found = after[place] if place is not None else history[own] if own is not None else None
    action = assistant(said) if said else None
    if found is not None and (said or mapping(found).get("tool_calls")):
        action = chat_message(found)
    before = step.get("query") or after[:place] or (history[:own] if own is not None else ())
    return [message for message in map(chat_message, sequence(before)) if message is not None], action


def _own(messages: Sequence[Any], step: Mapping[str, Any], places: Iterable[int]) -> int | None:
    """The first of the places where a step's own message stands; demonstrations are no steps."""
    said, did = name_or_none(step.get("response"), step.get("thought")), step.get("action")
    for place in places:
        message = mapping(messages[place])
        texts = (content_text(message.get("content")), message.get("thought"))
        is_own = said in texts if said else bool(did) and message.get("action") == did
        if message.get("role") == "assistant" and not message.get("is_demo") and is_own:
            return place
    return None


FORMAT = Documents("swe-agent", _marks, _read)
