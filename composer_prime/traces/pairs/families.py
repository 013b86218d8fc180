"""Circularity: a teacher that shares its model family with the student or the author tells them what they know.

Families are read from models' names, whoever serves them: `openrouter/anthropic/claude-sonnet-4` is claude.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

_MARKS = {
    "claude": r"claude|anthropic", "cohere": r"cohere|\bcommand-[ar]\b", "deepseek": r"deepseek",
    "gemini": r"gemini|gemma", "glm": r"glm|\bz-ai\b|\bzai-org\b", "gpt": r"gpt|\bo[134]\b|\bcodex|\bopenai/",
    "granite": r"\bgranite", "grok": r"\bgrok", "kimi": r"kimi|moonshot", "llama": r"(?<!o)llama(?!\W?cpp)",
    "minimax": r"minimax", "mistral": r"mi[sx]tral|ministral|magistral|codestral|devstral|pixtral",
    "nemotron": r"nemotron", "nova": r"\bnova-(?:micro|lite|pro|premier)", "olmo": r"\bolmo", "phi": r"\bphi-?\d",
    "qwen": r"qwen|\bqwq\b", "seed": r"\bseed-oss|\bdoubao", "yi": r"\byi-(?:\d|coder|lightning)",
}  # fmt: skip


@cache
def model_families(model: str) -> frozenset[str]:
    """The families that a model's name tells, `deepseek-r1-distill-qwen` two; else its name alone, without its path."""
    name = model.strip().lower()
    found = frozenset(family for family, mark in _MARKS.items() if re.search(mark, name))
    return found or frozenset({name.rstrip("/").rpartition("/")[2]})


Kin: TypeAlias = Literal["student", "author"]
"""Whose family a teacher's model may share."""


@dataclass(frozen=True)
class Circularity:
    """What is done about it.

    student  name of the model that is to be trained; None: unknown, and only authors are compared
    factor   on the weight of a teacher of the student's or the author's family, above 0 and at most 1
    """

    student: str | None = None
    factor: float = 0.25

    def shared_with(self, model: str, author: str | None) -> Kin | None:
        """Whose family a teacher's model shares; the student's where it shares both's."""
        families = model_families(model)
        if self.student and families & model_families(self.student):
            return "student"
        return "author" if author and families & model_families(author) else None
