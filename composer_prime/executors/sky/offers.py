"""The accelerators that a SkyPilot server can get, and what a job on one costs an hour."""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from composer_prime.executors import prices
from composer_prime.executors.base import Price, Resources, gpu_kinds
from composer_prime.executors.sky.task import OVERRUN_S, RESOURCES_VARIABLE

Listed = Mapping[str, Sequence[Sequence[Any]]]
"""`/list_accelerators`: an accelerator's name -> its offers, as `Offer` has their fields."""

_BOUND = f"give max_hourly_cost in {RESOURCES_VARIABLE}"
_OWN = ("kubernetes", "ssh", "slurm")
"""Clouds that are machines of one's own: SkyPilot lists no price for them."""

Offer = namedtuple("Offer", "cloud type accelerator num_gpus cpus device_gib memory_gib price spot_price region")
"""One kind of machine, in the order of the server's fields; dollars an hour, None: not listed."""


def matching(listed: Listed, wanted: Resources) -> list[Offer]:
    """The offers of the accelerators and the count that are wanted. Raises BadInput for one of which there is none."""
    known = {name: [Offer(*each) for each in offers] for name, offers in listed.items()}
    kinds, count = gpu_kinds(wanted), wanted.gpu_count or 1
    where = "SkyPilot (in its enabled clouds)"
    return [offer for kind in kinds for offer in prices.with_gpus(known, kind, count, where)]


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
        shipped, source = prices.listed("sky")
        usd = [shipped["usd_per_hour"].get(f"{kind}:{wanted.gpu_count or 1}") for kind in gpu_kinds(wanted)]
        stale = f"stale, since the server tells no price: {source}"
        return Price(None if None in usd else max(usd), stale, OVERRUN_S, _BOUND)
    infra = str(resources.get("infra", "")).partition("/")[0].lower().replace("k8s", "kubernetes")
    found = [offer for offer in matching(listed, wanted) if infra in ("", "*", offer.cloud.lower())]
    if found and all(offer.cloud.lower() in _OWN for offer in found):
        return Price(0.0, "machines of your own", OVERRUN_S)
    asked = [offer.spot_price if resources.get("use_spot") else offer.price for offer in found]
    known = sorted(each for each in asked if each is not None)
    if not known:
        return Price(None, f"SkyPilot's catalog at {server} has no price of it", OVERRUN_S)
    source = f"SkyPilot's catalog at {server} ({date.today()}), from ${known[0]:.2f} on: the dearest"
    return Price(known[-1], source, OVERRUN_S)
