"""SWE-agent's .traj, before and since 1.1, and mini-swe-agent's. Records are the steps, or the mini's messages.

A step says what the model was shown: `query` since 1.1, `messages` before. Where a history processor changed it, the
step is a branch of its own. Without either, the trajectory's `history` is the one line there is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.formats.chat import add_chat
from composer_prime.traces.ingest.formats.exchanges import RequestTree
from composer_prime.traces.ingest.messages import assistant, chat_message
from composer_prime.traces.ingest.reading import Document, Reading, read_documents
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, objects, sequence, string
from composer_prime.traces.ingest.session import Draft, arguments_of
from composer_prime.traces.states import Message, text_of

NAME = "swe-agent"
NO_RESPONSE = "step without a response"
NO_CONTEXT = "step that doesn't say what the model was shown"


def lacks(value: Any) -> list[str]:
    """What a JSON value lacks to be a trajectory of either agent."""
    given = mapping(value)
    if string(given.get("trajectory_format")).startswith("mini-swe-agent"):
        return [] if isinstance(given.get("messages"), list) else ["messages"]
    has_steps = any("action" in step and "observation" in step for step in objects(sequence(given.get("trajectory"))))
    return [] if has_steps else ["a trajectory of steps with action and observation"]


def read(parts: Sequence[Part]) -> Reading:
    """One session a trajectory."""
    return read_documents(NAME, parts, lacks, _read)


def _read(value: Mapping[str, Any]) -> Document:
    return _read_mini(value) if "trajectory_format" in value else _read_steps(value)


def _read_mini(value: Mapping[str, Any]) -> Document:
    messages = sequence(value["messages"])
    config = mapping(mapping(value.get("info")).get("config"))
    author = name_or_none(mapping(config.get("model")).get("model_name"))
    draft = Draft()
    document = Document(list(messages), drafts=[draft])
    add_chat(document, draft, enumerate(messages), author=author)
    for number, node in enumerate(draft.nodes):
        response = mapping(mapping(mapping(messages[node.records[0]]).get("extra")).get("response"))
        if node.is_turn and response:
            author = name_or_none(response.get("model"), node.author)
            draft.replace(number, author=author, usage=mapping(response.get("usage")) or None)
    return document


def _read_steps(value: Mapping[str, Any]) -> Document:
    steps = [mapping(step) for step in sequence(value["trajectory"])]
    shown = [_shown(step["query"]) if step.get("query") else _before(step) for step in steps]
    history = _shown(value.get("history"))
    if not any(shown):
        shown = _from_history(sequence(value.get("history")), len(steps))
    draft = Draft()
    document = Document(list(steps), drafts=[draft])
    tree = RequestTree(draft)
    model = mapping(mapping(arguments_of(string(value.get("replay_config"))).get("agent")).get("model"))
    for number, step in enumerate(steps):
        if not name_or_none(step.get("response"), step.get("thought")) and not step.get("tool_calls"):
            document.fates[number] = NO_RESPONSE
        elif not shown[number]:
            document.fates[number] = NO_CONTEXT
        else:
            later = shown[number + 1] if number + 1 < len(steps) else history
            action = _action(step, later[len(shown[number]) :])
            tree.act(action, tree.follow(shown[number], number), number, author=name_or_none(model.get("name")))
    return document


def _from_history(history: Sequence[Any], num_steps: int) -> list[list[Message]]:
    """What stands before each step's message; demonstrations are no steps."""
    before = [
        _shown(history[:place])
        for place, message in enumerate(map(mapping, history))
        if message.get("role") == "assistant" and not message.get("is_demo")
    ]
    return [*before[:num_steps], *([] for _ in range(num_steps - len(before)))]


def _before(step: Mapping[str, Any]) -> list[Message]:
    """What a step of 1.0 was shown: its `messages` are those after it, with what it did and saw at their end."""
    given = sequence(step.get("messages"))
    said = name_or_none(step.get("response"), step.get("thought"))
    for place in reversed(range(len(given))):
        message = mapping(given[place])
        if message.get("role") == "assistant":
            is_own = said in (message.get("content"), message.get("thought"))
            return _shown(given[:place] if is_own else given)
    return _shown(given)


def _shown(given: Any) -> list[Message]:
    return [message for message in map(chat_message, sequence(given)) if message is not None]


def _action(step: Mapping[str, Any], later: Sequence[Message]) -> Message:
    """What the model did: as the next request shows it, or of the step's own fields."""
    said = name_or_none(step.get("response"), step.get("thought")) or ""
    if step.get("tool_calls"):
        own = chat_message({"role": "assistant", "content": said, "tool_calls": step["tool_calls"]})
        return own or assistant(said)
    after = next(iter(later), None)
    return after if after is not None and after["role"] == "assistant" and text_of(after) == said else assistant(said)
