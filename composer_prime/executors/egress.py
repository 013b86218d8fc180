"""What a run's traffic with its bucket will cost, and whether the bucket is far from the machines: known beforehand.

Sites far from the bucket's provider pay for what they fetch; what they send is free with all of them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from composer_prime.errors import ComposerPrimeError
from composer_prime.executors.launching import LaunchPlan
from composer_prime.executors.prices import egress_usd_per_gb

Shapes = Callable[[str], Sequence[Any]]
"""A model's name to the names and shapes of its parameters; raises ModelError."""


def egress_lines(plan: LaunchPlan, shapes: Shapes) -> Iterator[str]:
    """One line on what fetching costs over the whole run; none where the bucket is a folder."""
    usd_per_gb, source = egress_usd_per_gb(plan.run_uri)
    if usd_per_gb == 0.0 and "://" not in plan.run_uri:
        return
    try:
        fetched = fetched_bytes(plan, shapes)
    except (ComposerPrimeError, OSError) as error:
        yield f"bucket traffic: not known beforehand ({error})"
        return
    gb = fetched / 1e9
    cost = "at an unknown price" if usd_per_gb is None else f"at most ${gb * usd_per_gb:.2f} where egress is charged"
    yield f"bucket traffic: all sites fetch {gb:.2f} GB in {plan.recipe.rounds} rounds, {cost} ({source})"


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


def region_lines(plan: LaunchPlan, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A warning when the bucket's region is known and isn't where the recipe says that the jobs run."""
    bucket = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    jobs = plan.recipe.launch.region
    if plan.run_uri.startswith("s3://") and bucket and jobs and bucket != jobs:
        yield (
            f"warning: the bucket is in {bucket} and the jobs run in {jobs} (launch.region): every byte they fetch is "
            "charged as egress, and takes longer; use a bucket there"
        )
