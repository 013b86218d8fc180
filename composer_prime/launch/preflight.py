"""What is seen before anything starts: access to the model, GPU memory, traffic with the bucket, jobs and prices."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from composer_prime.config import RecipeBase
from composer_prime.config.recipe import TINY_MODELS
from composer_prime.errors import BadInput, ComposerPrimeError
from composer_prime.executors.base import Resources, gpu_kinds
from composer_prime.executors.hf_jobs import flavors
from composer_prime.executors.modal import limits as modal_limits
from composer_prime.executors.prices import egress_usd_per_gb
from composer_prime.launch.budget import HOUR_S, Limits, allowed_s, check_bounded
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.plan import LaunchPlan
from composer_prime.launch.problems import Problems
from composer_prime.launch.records import Launch, LaunchBook
from composer_prime.store.memory import MemoryStore
from composer_prime.store.s3 import bucket_region

HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 10.0
GIB = 2**30
GPUS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
MOST_NAMED = 4

Estimate = Callable[[RecipeBase], int]
"""Bytes that a site needs on all its GPUs together, 0 where it needs none; raises ModelError where that isn't known."""
Shapes = Callable[[str], Sequence[Any]]
"""A model's name to the names and shapes of its parameters; raises ModelError."""


def access_lines(plan: LaunchPlan) -> Iterator[str]:
    """Asks the Hugging Face hub. Nothing for a model that the jobs may fetch, or that isn't the hub's; a line where it
    can't be known.

    Raises BadInput for a model that the hub doesn't give to the token that the jobs will have.
    """
    name = plan.recipe.model.name
    if name in TINY_MODELS or name.startswith(("/", ".", "~")) or Path(name).exists():
        return
    token = plan.secrets.reveal().get("HF_TOKEN")
    hub = plan.env.get("HF_ENDPOINT", HUB).rstrip("/")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        address = f"{hub}/api/models/{name}/auth-check"
        answer = httpx.get(address, headers=headers, timeout=HUB_TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield f"access to {name}: not checked ({hub} doesn't answer: {type(error).__name__})"
        return
    if answer.status_code in (401, 403, 404):
        refusal = (
            f"model.name ({name}): {hub} answers {answer.status_code} {answer.headers.get('X-Error-Code', '')} to "
            f"{'HF_TOKEN' if token else 'no HF_TOKEN, which jobs get from this environment'}: correct the name, accept "
            f"its terms at {hub}/{name} where it is gated, or export the HF_TOKEN of an account that may read it"
        )
        if token is not None or not set(plan.platforms) <= {"local", "ssh"}:
            raise BadInput(refusal)
        yield f"access to {name}: not certain, since the machines may have the model or a login of their own: {refusal}"
    elif not answer.is_success:
        yield f"access to {name}: not checked ({hub} answers {answer.status_code})"


def memory_lines(plan: LaunchPlan, estimate: Estimate) -> Iterator[str]:
    """What GPU memory a site needs and has on each platform, by gpus.toml; one line before where nobody gives out the
    GPUs that are asked for.

    Raises BadInput when it has too little, with what would do. What isn't known is said to be unchecked.
    """
    own = " and ".join(name for name in plan.platforms if name in ("local", "ssh"))
    if own and plan.resources.gpu is not None:
        yield f"GPUs: launch.gpu is neither looked for nor given out on {own}: a site sees all GPUs of its machine"
    try:
        needed = estimate(plan.recipe)
    except (ComposerPrimeError, OSError) as error:
        yield f"GPU memory: not checked ({error})"
        return
    if needed:
        yield from (f"GPU memory: {_compared(plan, platform, needed)}" for platform in plan.platforms)


def _compared(plan: LaunchPlan, platform: str, needed: int) -> str:
    gpu, needs = plan.resources.gpu, f"about {needed / GIB:.0f} GiB"
    found, offers = gpu_gib(platform, plan.resources), _offers(platform)
    if not found and (gpu is not None or not offers):
        return f"{needs} a site; not checked, since how much launch.gpu ({gpu}) has isn't known"
    has = f"{max(1, plan.resources.gpu_count)} x {gpu} (launch.gpu) has {found}" if gpu else "launch.gpu is not set"
    if needed > found * GIB:
        fitting = [name for gib, name in sorted(offers) if gib * GIB >= needed][:MOST_NAMED]
        remedy = f"{', '.join(fitting)} would do" if fitting else "take more GPUs, or a smaller model"
        raise BadInput(f"{plan.recipe.model.name} needs {needs} of GPU memory a site, and {has}: {remedy}")
    return f"{needs} a site, and {has}"


def gpu_gib(platform: str, resources: Resources) -> int:
    """GiB on all GPUs of a job together; 0: it has none, or that isn't known."""
    count, flavor_gib = max(1, resources.gpu_count), {name: gib for gib, name in _offers(platform)}
    sizes = [_gib(platform, kind) * count or flavor_gib.get(kind.lower(), 0) for kind in gpu_kinds(resources)]
    return min(sizes, default=0)


def _offers(platform: str) -> list[tuple[int, str]]:
    """(GiB, name) of all that a platform gives out; none where it isn't known what that is."""
    if platform == "hf-jobs":
        return [(_gib(platform, each.gpu or "") * each.num_gpus, each.name) for each in flavors.TABLE]
    kinds = modal_limits.GPUS.items() if platform == "modal" else ()
    return [(_gib(platform, kind) * n, f"{n} x {kind}") for kind, most in kinds for n in range(1, most + 1)]


def _gib(platform: str, kind: str) -> int:
    """Of one GPU, 0 where that isn't known: "RTX PRO 6000" and "rtx-pro-6000" are one."""
    name, sizes = kind.upper().replace(" ", "-"), GPUS["memory_gib"]
    return sizes.get(f"{platform} {name}", sizes.get(name, 0))


def bucket_lines(
    plan: LaunchPlan, shapes: Shapes | None, ask_region: Callable[[str], str | None] = bucket_region
) -> Iterator[str]:
    """A warning where the bucket isn't in the jobs' region, or that this isn't known; then what fetching costs in the
    whole run. Nothing where the bucket is a folder.

    shapes       None: what it costs isn't said
    ask_region   an S3 bucket's name to its region; None where that can't be had
    """
    uri, jobs, outer = plan.run_uri, plan.recipe.launch.region, plan.recipe.outer
    if egress_usd_per_gb(uri)[0] == 0:  # a folder
        return
    if jobs is not None:
        region = ask_region(uri.split("/")[2]) if uri.startswith("s3://") else None
        if region is None:
            yield f"launch.region ({jobs}) isn't compared with the bucket's, which doesn't say where it is"
        elif region != jobs:
            yield (
                f"warning: the bucket is in {region} and the jobs run in {jobs} (launch.region): every byte they fetch "
                "takes longer and is charged as egress; use a bucket there"
            )
    if shapes is not None and outer is not None:
        from composer_prime.outer.fragments import plan_fragments

        try:
            fragments = plan_fragments(shapes(plan.recipe.model.name), outer.fragments)
            yield traffic_line(plan.recipe, [each.numel for each in fragments], max(2, len(plan.sites)), uri)
        except (ComposerPrimeError, OSError) as error:
            yield f"bucket traffic: not known beforehand ({error})"


def traffic_line(recipe: RecipeBase, numels: Sequence[int], num_sites: int, uri: str) -> str:
    """What all sites together fetch from the bucket at `uri` in the whole run, records left out, and what it costs.

    numels   parameters of each fragment

    Sites far from the bucket's provider pay for what they fetch; what they send is free with all of them.
    """
    from composer_prime.outer.forecast import Pace, payloads_of, turn_bytes

    outer, rounds = recipe.outer, recipe.rounds
    assert outer is not None
    pace = Pace(outer.inner_steps, outer.fragments, outer.sync_delay, 1.0, num_sites, outer.gather_sites)
    payloads = payloads_of(numels, outer.codec, outer.merged_codec, outer.slices)
    gb = rounds * num_sites * sum(turn_bytes(payload, pace)[1] for payload in payloads) / 1e9
    usd_per_gb, source = egress_usd_per_gb(uri)
    cost = "at an unknown price" if usd_per_gb is None else f"${gb * usd_per_gb:.2f} where egress is charged"
    return f"bucket traffic: all sites fetch {gb:.2f} GB in {rounds} rounds, joins not counted, {cost} ({source})"


def described(plan: LaunchPlan, limits: Limits, problems: Problems, *, logged_in: bool) -> Iterator[str]:
    """Line by line, what would be started and what that costs an hour, asked of the platforms without starting
    anything; what they would refuse is noted.

    logged_in   whether a missing login is a problem, too
    """
    launch = Launch(number=1, name=f"{plan.recipe.run.name}-XXXXXXXX", created_at=0.0, created_by="")
    costs: list[float | None] = []
    with closing(Fleet(LaunchBook(MemoryStore("dry-run"), launch))) as fleet:
        for site in plan.sites:
            with problems.noted():
                on, spec = plan.places[site].on, fleet.spec(plan, site, 1, plan.timeout_s)
                executor = fleet.executor(on)
                executor.check(spec)
                if logged_in:
                    executor.log_in()
                price, waiting = fleet.price(plan, spec), len(plan.sites)
                check_bounded(limits, price, on)
                usd, over = price.usd_per_hour, price.overrun_s
                seconds = allowed_s(
                    limits, [], wanted_s=plan.timeout_s, usd_per_hour=usd, overrun_s=over, waiting=waiting, now=0.0
                )
                shown = executor.describe(replace(spec, timeout_s=max(1, seconds)))
                costs.append(usd)
                yield f"site {site} on {on}"
                yield from (f"  {line}" for line in shown.splitlines())
                yield f"  price {_usd(usd)} an hour ({price.source}); ends by itself after {seconds / HOUR_S:.2f} h"
    total = None if None in costs else sum(each or 0.0 for each in costs)
    yield f"all {len(plan.sites)} sites: {_usd(total)} an hour"
    yield f"run {plan.run_uri}; secrets from this environment: {', '.join(plan.secrets) or 'none'}"


def _usd(price: float | None) -> str:
    return "unknown" if price is None else f"${price:.2f}"
