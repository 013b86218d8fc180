"""What a run's traffic with its bucket will cost, and whether the bucket is far from the machines: known beforehand.

Sites far from the bucket's provider pay for what they fetch; what they send is free with all of them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from composer_prime.errors import ComposerPrimeError
from composer_prime.executors.prices import egress_usd_per_gb
from composer_prime.launch.plan import LaunchPlan
from composer_prime.store.s3 import bucket_region

Shapes = Callable[[str], Sequence[Any]]
"""A model's name to the names and shapes of its parameters; raises ModelError."""


def bucket_lines(
    plan: LaunchPlan,
    shapes: Shapes | None,
    *,
    ask_region: Callable[[str], str | None] = bucket_region,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[str]:
    """What fetching costs over the whole run, after a warning where the bucket isn't in the jobs' region, and a line
    where that can't be known.

    Nothing where the bucket is a folder.

    shapes       None: what it costs isn't said
    ask_region   an S3 bucket's name to its region, None where that can't be had
    """
    usd_per_gb, _ = egress_usd_per_gb(plan.run_uri)
    if is_folder(plan.run_uri):
        return
    jobs, far = plan.recipe.launch.region, ""
    if jobs:
        region, source = _region(plan.run_uri, ask_region, environment)
        if region is None:
            yield f"launch.region ({jobs}) isn't compared with the bucket's: {source}"
        elif region != jobs:
            far = (
                f"the bucket is in {region} (as {source}) and the jobs run in {jobs} (launch.region): every byte they "
                "fetch takes longer and is charged as egress"
            )
    if shapes is None:
        if far:
            yield f"warning: {far}; use a bucket there"
        return
    try:
        fetched = fetched_bytes(plan, shapes)
    except (ComposerPrimeError, OSError) as error:
        if far:
            yield f"warning: {far}, at a cost that isn't known beforehand; use a bucket there"
        yield f"bucket traffic: not known beforehand ({error})"
        return
    if far:
        dollars = "" if usd_per_gb is None else f", ${fetched / 1e9 * usd_per_gb:.2f} for the run's rounds"
        yield f"warning: {far}{dollars}; use a bucket there"
    yield traffic_line(fetched, plan.recipe.rounds, plan.run_uri)


def is_folder(uri: str) -> bool:
    """Whether a store costs nothing, since it is a folder of this machine."""
    return "://" not in uri or uri.startswith("file://")


def traffic_line(fetched: int, rounds: int, uri: str) -> str:
    """What it costs that all sites together fetch so many bytes in so many rounds from the bucket at `uri`."""
    usd_per_gb, source = egress_usd_per_gb(uri)
    gb = fetched / 1e9
    cost = "at an unknown price" if usd_per_gb is None else f"${gb * usd_per_gb:.2f} where egress is charged"
    return f"bucket traffic: all sites fetch {gb:.2f} GB in {rounds} rounds, joins not counted, {cost} ({source})"


def _region(
    uri: str, ask_region: Callable[[str], str | None], environment: Mapping[str, str]
) -> tuple[str | None, str]:
    """Where a bucket is and who says so; None where that can't be known, and why."""
    scheme, _, place = uri.partition("://")
    if scheme != "s3":
        return None, f"a {scheme}:// bucket isn't asked where it is"
    region = ask_region(place.partition("/")[0])
    if region is not None:
        return region, "it says itself"
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if environment.get(name):
            return environment[name], f"{name} says; it could not be asked"
    return None, "it doesn't say where it is, and neither AWS_REGION nor AWS_DEFAULT_REGION is set"


def fetched_bytes(plan: LaunchPlan, shapes: Shapes) -> int:
    """Bytes that all sites fetch from the bucket in the whole run, records left out."""
    from composer_prime.outer.forecast import Pace, payloads_of, turn_bytes
    from composer_prime.outer.fragments import plan_fragments

    recipe, outer = plan.recipe, plan.recipe.outer
    assert outer is not None
    sites = max(2, len(plan.sites))
    pace = Pace(outer.inner_steps, outer.fragments, outer.sync_delay, 1.0, sites, outer.gather_sites)
    fragments = plan_fragments(shapes(recipe.model.name), outer.fragments)
    payloads = payloads_of([fragment.numel for fragment in fragments], outer.codec, outer.merged_codec, outer.slices)
    return recipe.rounds * len(plan.sites) * sum(turn_bytes(payload, pace)[1] for payload in payloads)
