"""Rollouts a second, by the turns that they may take: a recipe's environment against its own inference server.

Run by `python -m tests.bench rollouts`. Client and server share the cores given, as at a site, and nothing trains.
"""

import asyncio
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_prime.bearer import SITE_TOKEN, site_token
from composer_prime.config.load import load_recipe
from composer_prime.config.recipe import Recipe
from composer_prime.config.settings import SiteSettings, settle_site
from composer_prime.errors import SiteError
from composer_prime.sites.embedded.inference_client import InferenceClient
from composer_prime.sites.embedded.ports import HOST, claim_port
from composer_prime.sites.embedded.processes import QUIET_ENV, Child
from composer_prime.sites.embedded.supervisor import role_command
from composer_prime.visible import log_handler


@dataclass(frozen=True)
class Speed:
    """What rollouts of at most `max_turns` came to; seconds are wall time."""

    max_turns: int
    rollouts: int
    failed: int
    seconds: float
    turns: float
    """Mean, of those that went through."""
    calls: float
    """Of tools, mean."""


def measure(recipe_path: Path, turns: Sequence[int], rollouts: int, num_cores: int) -> list[Speed]:
    """Play `rollouts` rollouts for each limit of turns, after a first group that isn't counted.

    num_cores  of those this process may use now; it and the server keep to so many afterwards.
    """
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory(prefix="bench-rollouts-") as folder:
        overrides = ["--output_dir", folder]
        recipe = load_recipe(recipe_path, overrides)
        model_dir = _model(recipe)
        return [_measure_one(_limited(recipe, limit), model_dir, limit, rollouts) for limit in turns]


def _model(recipe: Recipe) -> Path:
    from composer_prime.sites.embedded.local_run import model_command

    made = subprocess.run(model_command(recipe), capture_output=True, text=True, env={**os.environ, **QUIET_ENV})
    if made.returncode != 0:
        raise SiteError(f"model {recipe.model.name} can't be made: {made.stderr.strip().splitlines()[-1]}")
    return Path(made.stdout.strip().splitlines()[-1])


def _limited(recipe: Recipe, max_turns: int) -> Recipe:
    data = recipe.to_data()
    data["run"]["name"] = f"turns-{max_turns}"
    for source in data["orchestrator"]["train"]["source"]:
        source["env"].setdefault("agent", {})["max_turns"] = max_turns
    return Recipe.model_validate(data)


def _measure_one(recipe: Recipe, model_dir: Path, max_turns: int, rollouts: int) -> Speed:
    settings = settle_site(recipe, "a", inference_port=claim_port(None, set()), model_dir=model_dir, resume=False)
    settings.save()
    server = Child(
        "inference",
        role_command("inference", settings.paths.root),
        settings.paths.log("inference"),
        env=QUIET_ENV | {SITE_TOKEN: site_token()},
    )
    try:
        return asyncio.run(_play(settings, max_turns, rollouts))
    finally:
        server.kill()


async def _play(settings: SiteSettings, max_turns: int, rollouts: int) -> Speed:
    from composer_prime.sites.embedded.environments import load_sources
    from composer_prime.sites.embedded.rollouts import Group, RolloutPlayer
    from composer_prime.sites.embedded.start import import_tokenizers

    sources = load_sources(settings)
    import_tokenizers()
    size = settings.recipe.orchestrator.group_size
    async with InferenceClient(f"http://{HOST}:{settings.inference_port}") as inference:
        await inference.wait_ready()
        name = await inference.model_name()
        async with RolloutPlayer(sources, settings, base_url=inference.base_url, model=name) as player:

            async def play(first: int, number: int) -> list[Group]:
                tasks = [(first + index) % len(sources[0].tasks) for index in range(number)]
                return await asyncio.gather(*(player.play_group(0, task, size, 0) for task in tasks))

            await play(0, 1)
            began = time.perf_counter()
            groups = await play(1, max(1, rollouts // size))
            seconds = time.perf_counter() - began
    played = [rollout for group in groups for rollout in group.rollouts]
    number = max(1, len(played))
    return Speed(
        max_turns,
        len(played),
        sum(len(group.failures) for group in groups),
        seconds,
        sum(rollout.turns for rollout in played) / number,
        sum(rollout.streams.get("tools/calls", 0.0) for rollout in played) / number,
    )


def main(recipe: Path, turns: Sequence[int], rollouts: int, num_cores: int) -> None:
    """What `python -m tests.bench rollouts` calls."""
    logging.basicConfig(level=logging.WARNING, handlers=[log_handler()])  # or mcp sets up a log of its own
    found = measure(recipe, turns, rollouts, num_cores)
    print(f"rollouts of {recipe} on {num_cores} core(s), client and server together")
    print("  max turns  rollouts/s  mean turns  mean tool calls  failed")
    for speed in found:
        rate = speed.rollouts / speed.seconds
        print(f"  {speed.max_turns:9}  {rate:10.1f}  {speed.turns:10.2f}  {speed.calls:15.2f}  {speed.failed:6}")
    print(f"  load average {', '.join(f'{one:.2f}' for one in os.getloadavg())}")
