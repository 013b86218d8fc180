"""When two assistant messages are the same action: the same calls, the same command in a text, or the same text."""

import json
import posixpath
import re
from collections.abc import Collection, Sequence
from typing import Any

from composer_prime.traces.pairs.arguments import EXPLAINING, folded, normal_arguments, words_of
from composer_prime.traces.pairs.shell import normal_shell
from composer_prime.traces.states import Message, Tool, calls_of, canonical, digest, text_of

_READING = re.compile(r"(?:read|view|list|ls|grep|glob|search|find|fetch|get|web|files?|dir|directory|code|codebase)+")
_BLOCK = re.compile(r".*^```(?P<tag>[\w-]*)[ \t]*\n(?P<block>.*?)\n?^```\s*", re.MULTILINE | re.DOTALL)


def same_action(one: Message, other: Message, tools: Sequence[Tool], cwd: str | None = None) -> bool:
    """Whether two messages do the same; an equivalence, as `action_key` decides it."""
    return action_key(one, tools, cwd) == action_key(other, tools, cwd)


def action_key(
    message: Message, tools: Sequence[Tool], cwd: str | None = None, explaining: Collection[str] = EXPLAINING
) -> str:
    """64 hex digits that two assistant messages share exactly when they are the same action.

    tools       those of the session; without any, a command in a text is the action
    cwd         absolute path of the folder that the session works in
    explaining  TOOL.ARGUMENT whose values don't count

    Messages with calls: the same tools with the same arguments (`normal_arguments`); text beside them and ids make no
    difference, nor does the order of calls that only read. Messages without: the same text (`folded`).
    """
    cwd = posixpath.normpath(cwd) if cwd and cwd.startswith("/") else None
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls = []
    for call in calls_of(message):
        name, arguments = call["function"]["name"], call["function"].get("arguments", "")
        calls.append([name, normal_arguments(name, arguments, schemas.get(name, {}), cwd, explaining)])
    if all(_READING.fullmatch(word) for name, _ in calls for word in words_of(name)):
        calls.sort(key=canonical)
    return digest(["calls", calls] if calls else _said(text_of(message), cwd, is_all=not tools))


def is_empty(message: Message) -> bool:
    """Whether a message neither calls nor says anything."""
    return not calls_of(message) and not text_of(message).strip()


def _said(text: str, cwd: str | None, *, is_all: bool) -> list[Any]:
    """The form of a text: JSON by its tree, the one command in a fence at its end where there is nothing else to do."""
    found = _BLOCK.fullmatch(text) if text.count("```") == 2 else None
    block, tag = (found["block"], found["tag"]) if found else (text, "none")
    try:
        tree = json.loads(block if text.lstrip().startswith("```") else text)
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, dict | list):
        return ["JSON", tree]
    if is_all and (tag in ("", "sh", "shell") or "bash" in tag):
        return ["command", normal_shell(block, cwd) if tag or "\n" not in block else block]
    return ["text", folded(text)]
