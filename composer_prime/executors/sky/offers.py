"""The accelerators that a SkyPilot server can get, and what a job on one costs an hour."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.executors.base import Price, Resources, gpu_kinds
from composer_prime.executors.prices import accelerator_price
from composer_prime.executors.sky.task import OVERRUN_S, RESOURCES_VARIABLE

Listed = Mapping[str, Sequence[Sequence[Any]]]
"""`/list_accelerators`: an accelerator's name -> its offers, as `Offer` has their fields."""

_BOUND = f"give max_hourly_cost in {RESOURCES_VARIABLE}"
_OWN = ("kubernetes", "ssh", "slurm")
"""Clouds that are machines of one's own: SkyPilot lists no price for them."""


@dataclass(frozen=True)
class Offer:
    """One kind of machine, in the order of the server's fields; dollars an hour, None: not listed."""

    cloud: str
    instance_type: str | None
    accelerator: str
    count: float
    cpus: float | None
    device_memory_gib: float | None
    memory_gib: float | None
    price: float | None
    spot_price: float | None
    region: str | None


def matching(listed: Listed, wanted: Resources) -> list[Offer]:
    """The offers of the accelerators and the count that are wanted. Raises BadInput for one of which there is none."""
    return [offer for kind in gpu_kinds(wanted) for offer in _of_kind(listed, kind, wanted.gpu_count or 1)]


def _of_kind(listed: Listed, asked: str, count: int) -> list[Offer]:
    known = {name.lower(): name for name in listed}
    if asked.lower() not in known:
        near = [known[each] for each in difflib.get_close_matches(asked.lower(), known, n=3, cutoff=0.6)]
        names = f"nearest are {', '.join(near)}" if near else f"they have {', '.join(sorted(listed)) or 'none'}"
        raise BadInput(f"SkyPilot's enabled clouds have no accelerator {asked!r}: {names}")
    offers = [Offer(*each) for each in listed[known[asked.lower()]]]
    if found := [offer for offer in offers if offer.count == count]:
        return found
    counts = ", ".join(f"{each:g}" for each in sorted({offer.count for offer in offers}))
    raise BadInput(f"{count} x {asked}: SkyPilot's enabled clouds have machines with {counts} of them: ask for one")


def price(listed: Listed | None, wanted: Resources, resources: Mapping[str, Any], server: str) -> Price:
    """What an hour costs at most: SkyPilot goes on to dearer machines where the cheaper ones are out.

    listed   of all regions; None: the server tells of none, and the shipped table serves
    """
    most = resources.get("max_hourly_cost")
    if most is not None:
        return Price(float(most), "max_hourly_cost, above which SkyPilot takes no machine", OVERRUN_S)
    if wanted.gpu is None:
        return Price(None, "SkyPilot's API tells the price of no machine without a GPU", OVERRUN_S)
    if listed is None:
        shipped = [accelerator_price(f"{kind}:{wanted.gpu_count or 1}") for kind in gpu_kinds(wanted)]
        usd = [each.usd_per_hour for each in shipped if each.usd_per_hour is not None]
        source = f"stale, since the server tells no price: {shipped[0].source}"
        return Price(max(usd) if len(usd) == len(shipped) else None, source, OVERRUN_S, _BOUND)
    infra = str(resources.get("infra", "")).partition("/")[0].lower().replace("k8s", "kubernetes")
    found = [offer for offer in matching(listed, wanted) if infra in ("", "*", offer.cloud.lower())]
    if found and all(offer.cloud.lower() in _OWN for offer in found):
        return Price(0.0, "machines of your own", OVERRUN_S)
    prices = [offer.spot_price if resources.get("use_spot") else offer.price for offer in found]
    known = sorted(each for each in prices if each is not None)
    if not known:
        return Price(None, f"SkyPilot's catalog at {server} has no price of it", OVERRUN_S)
    source = f"SkyPilot's catalog at {server} ({date.today()}), from ${known[0]:.2f} on: the dearest"
    return Price(known[-1], source, OVERRUN_S)
