"""One site's settings on the fake inference server, for tests that play rollouts of the real environments."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_prime.config import SiteSettings, recipe_from_data


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `changes` in it."""
    merged = dict(base)
    for name, value in changes.items():
        merged[name] = merge(merged.get(name, {}), value) if isinstance(value, Mapping) else value
    return merged


def letters_site(
    output_dir: Path,
    *,
    port: int = 1,
    model_dir: Path = Path("unused"),
    taskset: Mapping[str, Any] | None = None,
    orchestrator: Mapping[str, Any] | None = None,
    shard: int = 0,
    num_shards: int = 1,
    sampling_seed: int = 0,
    resume: bool = False,
    max_steps: int = 1000,
    **tables: Any,
) -> SiteSettings:
    """Settings of site "a": 4 groups of 4 rollouts of reverse_letters a step, unless changed, and no outer loop."""
    source = {"name": "letters", "env": {"taskset": dict(taskset or {"id": "reverse-letters"})}}
    chosen = {
        "batch_size": 16,
        "group_size": 4,
        "max_off_policy_steps": 1,
        "train": {"source": [source], "sampling": {"max_completion_tokens": 8}},
    }
    recipe = {"run": {"name": "letters"}, "max_steps": max_steps, "output_dir": str(output_dir)}
    recipe["orchestrator"] = merge(chosen, orchestrator or {})
    settings = SiteSettings(
        recipe=recipe_from_data(recipe | tables),
        site="a",
        site_names=("a",),
        data_shard=shard,
        num_shards=num_shards,
        sampling_seed=sampling_seed,
        inference_port=port,
        model_dir=model_dir,
        run_uri=None,
        resume=resume,
    )
    settings.save()
    return settings
