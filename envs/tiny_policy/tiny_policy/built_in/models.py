"""What each built-in model is: its architecture, its tokens and its warm-up; made here, and kept by composer-prime.

Imports no torch until it makes one, so that a model that is there is found at once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_policy.built_in import conversations
from tiny_policy.built_in.phrases import PHRASES
from tiny_policy.built_in.warm_ups import (
    SMALL_SORT_WARM_UP,
    SMALL_TOOL_WARM_UP,
    SORT_WARM_UP,
    TOOL_WARM_UP,
    WARM_UP,
    ToolWarmUpConfig,
    WarmUpConfig,
)
from tiny_policy.qwen3 import ARCHITECTURE, SMALL_ARCHITECTURE, fresh_model, tiny_config, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    from tiny_policy.descent import Progress

VERSION = 1
"""Part of a model's key: raise it when the code that builds or warms one changes what comes out."""


@dataclass(frozen=True)
class BuiltIn:
    """A model that has a name: the sizes of its layers, and how it is warmed up, which says what it is for."""

    sizes: dict[str, Any]
    warm_up: WarmUpConfig | ToolWarmUpConfig

    @property
    def phrases(self) -> tuple[str, ...]:
        """Its tokens beside bytes and Qwen's own."""
        return PHRASES if isinstance(self.warm_up, ToolWarmUpConfig) else ()

    def config(self) -> Qwen3Config:
        return tiny_config({**self.sizes, "vocab_size": self.sizes["vocab_size"] + len(self.phrases)})

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tiny_tokenizer(self.phrases)

    def digest(self) -> str:
        """Of all that decides what is made of a seed."""
        shown = [self.phrases, conversations.shares()] if self.phrases else []
        parts = [self.sizes, version("transformers"), *shown, asdict(self.warm_up)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


BUILT_IN = {
    "tiny": BuiltIn(ARCHITECTURE, WARM_UP),
    "tiny-sort": BuiltIn(ARCHITECTURE, SORT_WARM_UP),
    "small-sort": BuiltIn(SMALL_ARCHITECTURE, SMALL_SORT_WARM_UP),
    "tiny-tools": BuiltIn(ARCHITECTURE, TOOL_WARM_UP),
    "small-tools": BuiltIn(SMALL_ARCHITECTURE, SMALL_TOOL_WARM_UP),
}
"""By `model.name`: composer-prime's TINY_MODELS."""


def key(name: str) -> str:
    """The name with all that its model depends on but seed and device."""
    return f"{name}-v{VERSION}-{BUILT_IN[name].digest()}"


def describe(name: str, folder: Path) -> None:
    """Write a model's configuration and tokenizer into a folder. Needs no torch."""
    BUILT_IN[name].config().save_pretrained(folder)
    BUILT_IN[name].tokenizer().save_pretrained(folder)


def make(
    name: str, folder: Path, seed: int, progress: Progress | None = None, *, num_threads: int = 1, device: str = "cpu"
) -> None:
    """Make a model, warmed up on the device, and save it as a folder. Raises ModelError for a seed that won't do."""
    from tiny_policy.built_in import letters, tools

    found = BUILT_IN[name]
    tokenizer = found.tokenizer()
    model = fresh_model(found.config(), seed, num_threads=num_threads, device=device)
    if isinstance(found.warm_up, ToolWarmUpConfig):
        tools.warm_up_tools(model, tokenizer, seed, found.warm_up, progress)
    else:
        letters.warm_up(model, tokenizer, seed, found.warm_up, progress)
    model.cpu().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
