"""A demonstration as token ids, written as an embedded site writes it: the qwen3 renderer, thinking off."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.config.recipe import RendererConfig
from composer_prime.errors import EnvError
from composer_prime.sites.embedded.renderer_choice import made_renderer, renderer_settings
from tiny_policy.playing import Demonstration
from tiny_policy.qwen3 import MAX_POSITIONS, QUIET


@dataclass(frozen=True)
class Sample:
    """One demonstration's tokens.

    turns   as long as token_ids: 0 where nothing is taught, else the number of the taught turn, from 1
    hinted  whether its one turn follows a hint
    """

    token_ids: list[int]
    turns: list[int]
    hinted: bool

    @property
    def longest_turn(self) -> int:
        """Tokens of its longest taught turn."""
        return max(self.turns.count(turn) for turn in range(1, max(self.turns) + 1))


def site_renderer(tokenizer: Any) -> Any:
    """The renderer by which a site writes for a model with this tokenizer."""
    settings = renderer_settings(RendererConfig(name="qwen3"), "", Path())
    return made_renderer(settings, Path(), tokenizer)


def render(families: Sequence[Sequence[Demonstration]], tokenizer: Any) -> list[list[Sample]]:
    """The samples of families of demonstrations, in their order. Raises EnvError for one that is too long."""
    renderer = site_renderer(tokenizer)
    quiet = len(tokenizer.encode(QUIET, add_special_tokens=False))
    return [[_render(each, renderer, quiet) for each in family] for family in families]


def _render(demonstration: Demonstration, renderer: Any, quiet: int) -> Sample:
    rendered = renderer.render(demonstration.messages, tools=demonstration.tools or None)
    places: dict[int, list[int]] = {turn: [] for turn in demonstration.taught}
    for place, (message, is_sampled) in enumerate(zip(rendered.message_indices, rendered.sampled_mask, strict=True)):
        if is_sampled and message in places:
            places[message].append(place)
    turns = [0] * len(rendered.token_ids)
    for number, said in enumerate(places.values(), 1):
        for place in said[quiet:]:  # the renderer takes the thinking that is off for said; in a site it is prompt
            turns[place] = number
    end = max(said[-1] for said in places.values()) + 1
    if end > MAX_POSITIONS:
        raise EnvError(
            f"a demonstration of task {demonstration.task.data.idx} has {end} tokens, and a tiny policy reads "
            f"{MAX_POSITIONS}: shorten the tools' descriptions and answers, or lower --max-turns"
        )
    return Sample(list(rendered.token_ids[:end]), turns[:end], demonstration.hinted)
