"""Hints that give a task's answer away: the policy would learn it, and not how to find it."""

import re
from collections.abc import Sequence
from typing import Any

from composer_prime.hints.error_sites import text_of

SHORT = 3
"""Characters of an answer that may stand in a hint by chance."""

ANNOUNCED = r"(?:\b(?:answer|repl|respon|result|solution|final|say)\w*\b[^.!?\n]*|(?:\bis|\bare|=|:|->)\s*[\"'`(]?)"
"""What stands before an answer that is given away."""


def said_before(nodes: Sequence[Any], turn: int) -> str:
    """What was said before a turn, calls included."""
    told = []
    for node in nodes[:turn]:
        calls = getattr(node.message, "tool_calls", None) or []
        told += [text_of(node.message.content), *(f"{call.name} {call.arguments}" for call in calls)]
    return "\n".join(told)


def leaks(hint: str, data: Any, before: str) -> bool:
    """Whether a hint gives away the task's `answer`, letter case aside: as words of its own, which a short answer can
    be by chance. So one of up to SHORT characters must follow what announces an answer, and a longer one is no secret
    where it was said before."""
    answer = str(getattr(data, "answer", None) or "").strip()
    if not answer:
        return False
    words = rf"(?<!\w){re.escape(answer)}(?!\w)"
    if len(answer) <= SHORT:
        return re.search(ANNOUNCED + words, hint, re.IGNORECASE) is not None
    return re.search(words, hint, re.IGNORECASE) is not None and not re.search(words, before, re.IGNORECASE)
