"""The baseline beside the teachers: imitate the hinted rollouts that earned a reward (rejection sampling).

The first policy plays ROLLOUTS rollouts, each mistake taken back for what it says under the hint. Those
that earned the most are learned from, without their hints, until they get no likelier.
"""

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from composer_prime.ablate.held_out import held_out_reward
from composer_prime.config.paths import models_cache
from composer_prime.config.recipe import Recipe
from composer_prime.sites.embedded.model import load_policy, resolve_model
from tiny_policy.making import load
from tiny_policy.packing import pack
from tiny_policy.player import Player
from tiny_policy.playing import Demonstration, Stagehand
from tiny_policy.rendering import Sample, render, site_renderer

ROLLOUTS = 1024
PER_STEP = 32
"""Conversations."""
STEPS = 120
"""As many updates as a run of the longest recipe here has, or more."""


@dataclass
class PolicyPlayer:
    """A policy as a scripted player: samples its next turn at temperature 1."""

    model: Any
    tokenizer: Any
    tools: list[dict[str, Any]]
    max_tokens: int

    @torch.no_grad()
    def __call__(self, task: Any, messages: Sequence[dict[str, Any]], rng: random.Random) -> dict[str, Any] | str:
        renderer = site_renderer(self.tokenizer)
        asked = renderer.render_ids([_sent(each) for each in messages], tools=self.tools, add_generation_prompt=True)
        torch.manual_seed(rng.getrandbits(32))
        limits = {"max_new_tokens": self.max_tokens, "pad_token_id": self.tokenizer.pad_token_id}
        told = self.model.generate(torch.tensor([asked]), do_sample=True, temperature=1.0, top_k=0, **limits)
        said = renderer.parse_response(told[0, len(asked) :].tolist(), tools=self.tools)
        calls = [{"name": call.name, "arguments": call.arguments} for call in said.tool_calls or []]
        if not calls or not all(call["name"] and isinstance(call["arguments"], dict) for call in calls):
            return said.content or ""
        return {"content": said.content or "", "tool_calls": calls}


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else {**message}


async def hinted_rollouts(recipe: Recipe, player: Any, count: int, seed: int) -> list[tuple[Demonstration, float]]:
    """So many rollouts of a recipe's tasks in which every hint was heeded as `player` heeds it, and what they earned.

    player  None: the taskset's own
    """
    (table,) = recipe.to_data()["orchestrator"]["train"]["source"]
    settings = {key: value for key, value in table["env"]["taskset"].items() if key != "id"}
    max_turns = table["env"]["agent"]["max_turns"]
    source = load(table["env"]["taskset"]["id"], settings, recipe.run.seed, max_turns)
    name = table["env"]["taskset"]["id"]
    own = Player.of(source.env.taskset, name)
    assert source.tools is not None
    await source.tools.open(name, source.tasks[0])
    try:
        if player is not None:
            (example, *_), *_ = await Stagehand(source, own, max_turns, with_hints=False).play(
                source.tasks[0], random.Random(seed)
            )
            player.tools, own = example.tools, Player(name, player)
        stagehand = Stagehand(source, own, max_turns, with_hints=True)
        drawn = itertools.islice(itertools.cycle(source.tasks), count)
        return [await stagehand.heed(task, random.Random(f"{seed}/{number}")) for number, task in enumerate(drawn)]
    finally:
        await source.tools.close()


def player_reward(recipe: Recipe, count: int = 256) -> float:
    """What the task's scripted player comes to when it heeds every hint."""
    played = asyncio.run(hinted_rollouts(recipe, None, count, recipe.run.seed))
    return sum(reward for _, reward in played) / count


def imitate(recipe: Recipe, *, prompts: int) -> dict[str, Any]:
    """Make the baseline of a recipe's seed and judge it as `ablate` judges an arm; its row."""
    torch.set_num_threads(1)
    seed = recipe.run.seed
    folder = resolve_model(recipe.model.name, seed, models_cache())
    model, tokenizer = load_policy(folder), AutoTokenizer.from_pretrained(folder)
    sampling = recipe.to_data()["orchestrator"]["train"]["sampling"]
    player = PolicyPlayer(model.eval(), tokenizer, [], sampling["max_completion_tokens"])
    played = asyncio.run(hinted_rollouts(recipe, player, ROLLOUTS, seed))
    most = max(reward for _, reward in played)
    kept = [shown for shown, reward in played if reward == most > 0]
    if kept:
        learn(model, [sample for (sample,) in render([[each] for each in kept], tokenizer)], seed)
    policy = {name: value.detach() for name, value in model.named_parameters()}
    held_out = held_out_reward(recipe, policy, prompts=prompts, temperature=0.0)
    return {"arm": "imitation", "seed": seed, "held_out": held_out, "rollouts": ROLLOUTS, "kept": len(kept)}


def learn(model: Any, samples: Sequence[Sample], seed: int) -> None:
    """Supervised training on what was said, in place."""
    dice = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for _ in range(STEPS):
        drawn = dice.choices(samples, k=PER_STEP)
        batch = pack([[sample] for sample in drawn])
        optimizer.zero_grad()
        (-batch.turn_logprobs(model).sum() / len(batch.targets)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
