"""The reward of given weights on tasks that no site of the run was ever shown: what a run is judged by in the end.

The weights go into a real inference server, the recipe's environments are played against it as in training, and the
tasks are those of shards after the last site's. They are compared with every site's, all but their labels: an
environment that gives the same tasks again is refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import verifiers.v1 as vf
from torch import Tensor

from composer_prime.bearer import SITE_TOKEN, site_token
from composer_prime.config.distill import DistillConfig
from composer_prime.config.paths import models_cache
from composer_prime.config.recipe import Recipe
from composer_prime.config.settings import SiteSettings, data_shard, settle_site
from composer_prime.config.teachers import ReplayConfig
from composer_prime.errors import BadInput, ComposerPrimeError, ProcessCrashed, SiteError
from composer_prime.sites.embedded.broadcasts import load_weights
from composer_prime.sites.embedded.environments import Source, load_sources
from composer_prime.sites.embedded.inference_client import InferenceClient
from composer_prime.sites.embedded.model import load_policy, resolve_model
from composer_prime.sites.embedded.orchestrator import leave_proxies_out
from composer_prime.sites.embedded.ports import HOST, claim_port
from composer_prime.sites.embedded.processes import QUIET_ENV, Child, answer_of
from composer_prime.sites.embedded.rollouts import RolloutPlayer
from composer_prime.sites.embedded.supervisor import role_command
from composer_prime.store.base import Store
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import load_run
from composer_prime.sync.snapshots import newest_master

STOP_S = 5.0
"""Seconds the inference server gets for its end."""
_POLL_S = 0.1
_LABELS = {"idx", "id", "name", "description"}
"""What tells tasks apart for people alone, in verifiers' words."""


def held_out_reward(
    recipe: Recipe,
    weights: Mapping[str, Tensor],
    *,
    prompts: int = 512,
    rollouts: int = 1,
    temperature: float | None = None,
) -> float:
    """Mean reward of a policy on tasks that no site of the recipe trains on, without the recipe's teachers and hints.

    weights      the policy's parameters by name, a tied one once: such as `final_weights` gives
    prompts      tasks, over all sources; they follow from the recipe alone, so two policies of equal recipes (but for
                 what tasks don't depend on) meet the same ones
    rollouts     tries at each task
    temperature  of the sampling; None: the recipe's, under which it was trained; 0: the likeliest token, without chance

    Raises BadInput when the environments have too few tasks that no site has, SiteError when a rollout fails
    or a process ends.
    """
    with tempfile.TemporaryDirectory(prefix="held-out-") as scratch:
        folder = Path(scratch)
        base = resolve_model(recipe.model.name, recipe.run.seed, models_cache(), device=recipe.site.device)
        settings = settle_site(
            _bare(recipe).model_copy(update={"output_dir": folder / "outputs"}),
            recipe.site_names[0],
            inference_port=claim_port(None, set()),
            model_dir=write_model(base, weights, folder / "model"),
            resume=False,
        )
        settings.model_copy(update={"sampling_seed": 0}).save()
        cooled = [] if temperature is None else [str(temperature)]
        return _in_a_process(settings, [str(settings.paths.root), str(prompts), str(rollouts), *cooled])


def _bare(recipe: Recipe) -> Recipe:
    """The recipe without what teaches its policy, which would be asked about every rollout."""
    trainer = recipe.trainer.model_copy(update={"distill": DistillConfig()})
    return recipe.model_copy(update={"replay": ReplayConfig(), "hints": None, "trainer": trainer})


def _in_a_process(settings: SiteSettings, arguments: Sequence[str]) -> float:
    """What `main` prints in a process of its own: verifiers keeps locks of the first event loop it meets."""
    command = [sys.executable, "-m", "composer_prime.ablate.held_out", *arguments]
    answer = answer_of("held-out", command, settings.paths.log("held-out"))
    assert answer is not None  # nobody stops it
    return float(answer)


def final_weights(store: Store) -> dict[str, Tensor]:
    """The final masters of a finished run, by parameter name, each in its shape, fp32.

    store   the run's root, such as `open_store(run_uri(recipe))`

    Raises BadInput when no run is there or it hasn't come to its end.
    """
    manifest, sha = find_manifest(store)
    run, roster = load_run(store), Roster(store, manifest, sha)
    roster.refresh()
    found: dict[str, Tensor] = {}
    for fragment in run.fragments:
        master = newest_master(store, run, roster, fragment.index)
        if master is None or master.version != run.terms.final_version:
            at = "none" if master is None else f"version {master.version}"
            raise BadInput(
                f"{store.uri} holds no final master of fragment {fragment.index} (newest stored: {at}, final: version "
                f"{run.terms.final_version}): let the run come to its end first"
            )
        pieces = master.weights.split([math.prod(shape) for shape in fragment.shapes])
        found |= {
            name: piece.view(shape) for name, piece, shape in zip(fragment.names, pieces, fragment.shapes, strict=True)
        }
    return found


def held_out_sources(settings: SiteSettings, prompts: int) -> list[Source]:
    """The recipe's sources with `prompts` tasks in all that no site has, an equal share each: shards after the last.

    Raises BadInput when there are too few, or when a task is also one of a site's.
    """
    recipe = settings.recipe
    seen = _trained_on(recipe)
    first = max(data_shard(recipe, name) for name in recipe.site_names) + 1
    sources = load_sources(_on_shard(settings, first))
    share = -(-prompts // len(sources))
    for number in range(first + 1, first + prompts):  # a shard has a task at least
        if all(len(source.tasks) >= share for source in sources):
            break
        for source, more in zip(sources, load_sources(_on_shard(settings, number)), strict=True):
            source.tasks.extend(more.tasks)
    for source in sources:
        if shown := sum(_content(source, task) in seen for task in source.tasks):
            raise BadInput(
                f"{shown} of {len(source.tasks)} tasks of environment {source.name!r} are also tasks of a site: "
                "held-out tasks need an environment that cuts its own shards (num_shards, shard) without overlap"
            )
    return [replace(source, tasks=source.tasks[:share]) for source in sources]


def check_unseen(judged_by: Recipe, trained: Recipe, prompts: int) -> None:
    """Raise BadInput when a site of `trained` has one of the `prompts` tasks that `judged_by` holds out, or when those
    are too few; EnvError when an environment can't be set up."""
    seen = _trained_on(trained)
    for source in held_out_sources(_settings_of(judged_by, judged_by.site_names[0]), prompts):
        if shown := sum(_content(source, task) in seen for task in source.tasks):
            raise BadInput(
                f"{shown} of {len(source.tasks)} held-out tasks of environment {source.name!r} are tasks of a site of "
                "this arm: let its sites have none but the tasks of the first arm's (num_examples, seed)"
            )


def _trained_on(recipe: Recipe) -> set[str]:
    """What the tasks of all sites say and know."""
    sites = [_settings_of(recipe, name) for name in recipe.site_names]
    return {_content(source, task) for site in sites for source in load_sources(site) for task in source.tasks}


def _settings_of(recipe: Recipe, site: str) -> SiteSettings:
    """A site's settings as far as its tasks depend on them."""
    return settle_site(recipe, site, inference_port=1, model_dir=Path(), resume=False)


def _on_shard(settings: SiteSettings, shard: int) -> SiteSettings:
    return settings.model_copy(update={"data_shard": shard, "num_shards": shard + 1})


def _content(source: Source, task: vf.Task) -> str:
    """All that a task says and knows, but for the taskset's settings that stand in it too, such as how it is scored:
    with tools, tasks of one prompt may have different answers."""
    return task.data.model_dump_json(exclude=_LABELS | set(type(source.env.taskset.config).model_fields))


def _cooled(settings: SiteSettings, temperature: float | None) -> SiteSettings:
    """The settings with another sampling temperature; 0 is none of a recipe's, but the server knows it."""
    if temperature is None:
        return settings
    recipe = settings.recipe
    sampling = recipe.orchestrator.train.sampling.model_copy(update={"temperature": temperature})
    train = recipe.orchestrator.train.model_copy(update={"sampling": sampling})
    orchestrator = recipe.orchestrator.model_copy(update={"train": train})
    return settings.model_copy(update={"recipe": recipe.model_copy(update={"orchestrator": orchestrator})})


def write_model(base: Path, weights: Mapping[str, Tensor], folder: Path) -> Path:
    """A copy of the model folder with these weights in it. Raises BadInput when they aren't the model's."""
    model = load_policy(base)
    own = {name: tuple(value.shape) for name, value in model.named_parameters()}
    given = {name: tuple(value.shape) for name, value in weights.items()}
    differing = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
    if differing:
        raise BadInput(
            f"weights are not those of {base}: {differing[0]} has shape {given.get(differing[0])} here and "
            f"{own.get(differing[0])} there ({len(differing)} differ): give the final masters of a run of this model"
        )
    load_weights(model, dict(weights))
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*", "pytorch_model*"), dirs_exist_ok=True)
    model.save_pretrained(folder)
    return folder


async def _score(settings: SiteSettings, sources: Sequence[Source], rollouts: int, temperature: float | None) -> float:
    """Serve the policy in settings.model_dir and play every task `rollouts` times."""
    leave_proxies_out()
    log = settings.paths.log("inference")
    env = QUIET_ENV | {SITE_TOKEN: site_token()}
    server = Child("inference", role_command("inference", settings.paths.root), log, env=env)
    try:
        async with InferenceClient(f"http://{HOST}:{settings.inference_port}") as inference:
            await _wait_ready(server, inference)
            base_url, model = inference.base_url, await inference.model_name()
            async with RolloutPlayer(sources, _cooled(settings, temperature), base_url=base_url, model=model) as player:
                places = [(number, task) for number, one in enumerate(sources) for task in range(len(one.tasks))]
                groups = await asyncio.gather(*(player.play_group(*place, rollouts, 0) for place in places))
    finally:
        server.terminate()
        server.wait(STOP_S)
        server.kill()
    failures = [failure for group in groups for failure in group.failures]
    if failures:
        raise SiteError(f"{len(failures)} of {rollouts * len(groups)} held-out rollouts failed: {failures[-1]}")
    return statistics.fmean(rollout.reward for group in groups for rollout in group.rollouts)


async def _wait_ready(server: Child, inference: InferenceClient) -> None:
    """Return once the server answers. Raises ProcessCrashed with the end of its log when it ends before."""
    ready = asyncio.create_task(inference.wait_ready())
    try:
        while not ready.done():
            if server.poll() is not None:
                raise ProcessCrashed("the inference server of the held-out tasks ended: " + "\n".join(server.tail()))
            await asyncio.sleep(_POLL_S)
        await ready
    finally:
        ready.cancel()


def main(arguments: Sequence[str]) -> int:
    """Print the held-out reward: SITE_DIR with settings and model, PROMPTS, ROLLOUTS and, when not the recipe's, the
    TEMPERATURE. The exit code is the error's."""
    site_dir, prompts, rollouts, *cooled = arguments
    temperature = float(cooled[0]) if cooled else None
    for name in ("httpx", "verifiers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        settings = SiteSettings.load(site_dir)
        sources = held_out_sources(settings, int(prompts))
        print(asyncio.run(_score(settings, sources, int(rollouts), temperature)))
    except ComposerPrimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
