"""Where a rollout met a tool's error: the tool's message that shows it, and the turn that came after.

Only messages of role `tool` are looked at: what a user or the policy writes about errors is no error.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.config.teachers import HintKind

LINE_CHARS = 200
"""Characters of the telling line that a hint may quote."""

_TRACEBACK = re.compile(r"^\s*(?:\+ Exception Group )?Traceback \(most recent call last\)", re.MULTILINE)
_EXIT_CODE = re.compile(
    r"\b(?:exit(?:ed)?(?: with)?[ _](?:code|status)|return[ _]?code|exited with)\b\W{0,4}(-?\d+)",
    re.IGNORECASE,
)
_ERROR_LINE = re.compile(r"^\W{0,3}(?:\w*(?:Error|Exception)\b|error\b|fatal\b|.*: command not found\b)", re.IGNORECASE)
_EXIT_KEYS = ("exit_code", "exitcode", "returncode", "return_code")
_ERROR_FLAGS = ("is_error", "isError")


@dataclass(frozen=True)
class ErrorSite:
    """One error that the policy saw.

    tool, turn  indices of nodes: the tool's message, and the sampled message that follows it
    kind        what it was known by
    line        what tells it best, one line
    tool_name   the tool's name, where the message has it
    """

    tool: int
    turn: int
    kind: HintKind
    line: str
    tool_name: str | None


def error_sites(nodes: Sequence[Any]) -> list[ErrorSite]:
    """The errors in the nodes of a verifiers trace, at most one for each sampled message: the last that precedes it."""
    sites = []
    for turn, node in enumerate(nodes):
        if not (node.sampled and any(node.mask)):
            continue
        place = node.parent
        while place is not None and nodes[place].message.role == "tool":
            message = nodes[place].message
            if (found := find_error(text_of(message.content))) is not None:
                sites.append(ErrorSite(place, turn, *found, tool_name=getattr(message, "name", None)))
                break
            place = nodes[place].parent
    return sites


def find_error(text: str) -> tuple[HintKind, str] | None:
    """What kind of error a tool's answer shows, and the line that tells it; None for an answer without one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if _TRACEBACK.search(text):
        return "traceback", lines[-1][:LINE_CHARS]
    declared = _parse(text)
    if declared is not None:
        return _find_declared(declared)
    for line in lines:
        code = _EXIT_CODE.search(line)
        if code is not None and int(code[1]) != 0:
            return "exit_code", line[:LINE_CHARS]
    return ("error", lines[0][:LINE_CHARS]) if _ERROR_LINE.match(lines[0]) else None


def text_of(content: Any) -> str:
    """A message's text: what it says, or its parts of type text."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or [] if getattr(part, "type", None) == "text")


def _parse(text: str) -> dict[str, Any] | list[Any] | None:
    """A tool's answer that is JSON: what it declares counts, not the words in it."""
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict | list) else None


def _find_declared(answer: dict[str, Any] | list[Any]) -> tuple[HintKind, str] | None:
    """The error that a tool's JSON object declares; a list declares none."""
    if isinstance(answer, list):
        return None
    code = next((answer[key] for key in _EXIT_KEYS if isinstance(answer.get(key), int)), 0)
    told = next((answer[key] for key in ("error", "stderr", "message") if isinstance(answer.get(key), str)), "")
    line = next((line.strip() for line in reversed(told.splitlines()) if line.strip()), "")[:LINE_CHARS]
    if code != 0:
        return "exit_code", line or f"exit code {int(code)}"
    failed = bool(answer.get("error")) or answer.get("status") == "error"
    if failed or any(answer.get(flag) is True for flag in _ERROR_FLAGS):
        return "error", line or "error"
    return None
