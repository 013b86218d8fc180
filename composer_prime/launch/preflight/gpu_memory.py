"""Whether a recipe fits the GPUs that it asks for: seen before anything starts, from gpus.toml and the model's size."""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from composer_prime.config import RecipeBase
from composer_prime.errors import BadInput, ComposerPrimeError
from composer_prime.executors.base import Resources, gpu_kinds
from composer_prime.executors.hf_jobs import flavors as hf_jobs_flavors
from composer_prime.executors.modal import limits as modal_limits
from composer_prime.launch.plan import LaunchPlan

Estimate = Callable[[RecipeBase], int]
"""Bytes that a site needs on all its GPUs together, 0 where it needs none; raises ModelError where that isn't known."""

GIB = 2**30
MOST_NAMED = 4
_FILE = Path(__file__).with_name("gpus.toml")


def memory_lines(plan: LaunchPlan, estimate: Estimate) -> Iterator[str]:
    """One line on the GPU memory that a site needs and has, none where it needs none; one more where nobody gives out
    the GPUs that are asked for.

    Raises BadInput when it has too little, with what would do. What isn't known is said to be unchecked.
    """
    asked = f"{max(1, plan.resources.gpu_count)} x {plan.resources.gpu}"
    own = [name for name in plan.platforms if name in ("local", "ssh")]
    if own and plan.resources.gpu is not None:
        yield (
            f"GPUs: {asked} (launch.gpu) is neither looked for nor given out on {' and '.join(own)}: every site sees "
            "all GPUs of its machine, or those that CUDA_VISIBLE_DEVICES names"
        )
    try:
        needed = estimate(plan.recipe)
    except (ComposerPrimeError, OSError) as error:
        yield f"GPU memory: not checked ({error})"
        return
    if needed == 0:
        return
    for platform in plan.platforms:
        yield from _platform_line(plan, platform, needed, asked)


def _platform_line(plan: LaunchPlan, platform: str, needed: int, asked: str) -> Iterator[str]:
    about = f"about {needed / GIB:.0f} GiB"
    if plan.resources.gpu is None:
        if platform in _OFFERS:
            raise BadInput(
                f"{plan.recipe.model.name} needs {about} of GPU memory a site, and launch.gpu is not set: "
                f"{_remedy(platform, needed)}"
            )
        yield f"GPU memory: {about} a site; not checked, since launch.gpu doesn't name the GPU"
        return
    found = gpu_gib(platform, plan.resources)
    if found is None:
        yield f"GPU memory: {about} a site; not checked, since how much a {plan.resources.gpu} has isn't known"
        return
    if needed > found * GIB:
        raise BadInput(
            f"{plan.recipe.model.name} needs {about} of GPU memory a site, and {asked} (launch.gpu) has {found:g}: "
            f"{_remedy(platform, needed)}"
        )
    yield f"GPU memory: {about} a site, and {asked} has {found:g}"


def gpu_gib(platform: str, resources: Resources) -> float | None:
    """GiB on all GPUs of a job together; None: not known."""
    kind, count = resources.gpu or "", max(1, resources.gpu_count)
    if platform == "hf-jobs":
        try:
            flavor = hf_jobs_flavors.choose(hf_jobs_flavors.TABLE, resources)
        except BadInput:
            return None  # the service may have newer ones, and refuses what it doesn't have
        kind, count = flavor.gpu or "", flavor.num_gpus
    sizes = [_known(platform).get(_plain(each)) for each in gpu_kinds(replace(resources, gpu=kind))]
    return None if None in sizes else min(size for size in sizes if size is not None) * count


def _remedy(platform: str, needed: int) -> str:
    offers = _OFFERS[platform](needed) if platform in _OFFERS else []
    if not offers:
        return "take more GPUs, or a smaller model"
    return f"{', '.join(offers[:MOST_NAMED])} would do"


def _modal_offers(needed: int) -> list[str]:
    """The fewest of each kind that fit, the smallest first."""
    fitting = []
    for kind, most in modal_limits.GPUS.items():
        each = _known("modal").get(_plain(kind))
        count = None if each is None else -(-needed // (GIB * each))
        if each is not None and count is not None and count <= most:
            fitting.append((each * count, f"{count} x {kind}"))
    return [name for _, name in sorted(fitting)]


def _hf_offers(needed: int) -> list[str]:
    """The flavors that fit, the cheapest first."""
    known = _known("hf-jobs")
    cheapest_first = sorted(hf_jobs_flavors.TABLE, key=lambda flavor: flavor.usd_per_hour or 0.0)
    total = {flavor.name: known.get(_plain(flavor.gpu or ""), 0) * flavor.num_gpus for flavor in cheapest_first}
    return [name for name, gib in total.items() if gib * GIB >= needed]


_OFFERS: dict[str, Callable[[int], list[str]]] = {"modal": _modal_offers, "hf-jobs": _hf_offers}


@cache
def table() -> dict[str, Any]:
    """The file as it stands."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def _known(platform: str) -> dict[str, int]:
    named = {**table()["memory_gib"], **table().get(platform, {}).get("memory_gib", {})}
    return {_plain(name): gib for name, gib in named.items()}


def _plain(name: str) -> str:
    """Without case, and with one word for all that parts words: "RTX PRO 6000" and "rtx-pro-6000" are one."""
    return name.lower().replace(" ", "-")
