"""When two assistant messages are the same action: the same calls, or without calls the same text."""

from collections.abc import Sequence

from composer_prime.traces.pairs.arguments import normal_arguments
from composer_prime.traces.states import Message, Tool, calls_of, canonical, digest, text_of


def same_action(one: Message, other: Message, tools: Sequence[Tool]) -> bool:
    """Whether two messages do the same; an equivalence, as `action_key` decides it."""
    return action_key(one, tools) == action_key(other, tools)


def action_key(message: Message, tools: Sequence[Tool]) -> str:
    """64 hex digits that two assistant messages share exactly when they are the same action.

    Messages with calls: the same tools with the same arguments (`normal_arguments`); text beside them, ids and the
    order of parallel calls make no difference. Messages without: the same text but for whitespace and case.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls = []
    for call in calls_of(message):
        name, arguments = call["function"]["name"], call["function"].get("arguments", "")
        calls.append([name, normal_arguments(name, arguments, schemas.get(name, {}))])
    return digest(["calls", sorted(calls, key=canonical)] if calls else ["text", folded(text_of(message))])


def folded(text: str) -> str:
    """A text without what whitespace and case tell."""
    return " ".join(text.split()).casefold()


def is_empty(message: Message) -> bool:
    """Whether a message neither calls nor says anything."""
    return not calls_of(message) and not text_of(message).strip()
