"""What platforms list as their prices: prices.toml, one dated file, for platforms that don't tell it themselves."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from composer_prime.executors.base import Price, Resources, gpu_kinds

_FILE = Path(__file__).with_name("prices.toml")


@cache
def table() -> dict[str, Any]:
    """The file as it stands."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def modal_price(resources: Resources, *, cpus: float = 0.125, memory_gib: float = 0.125) -> Price:
    """A Modal container's price, with the dearest of the GPUs that may serve it.

    cpus, memory_gib   the platform's defaults, where `resources` say nothing
    """
    listed = table()["modal"]
    source = f"{listed['source']} ({listed['date']})"
    known = {name.upper(): price for name, price in listed["usd_per_gpu_hour"].items()}
    per_gpu = 0.0
    for kind in gpu_kinds(resources):
        if kind.upper() not in known:
            return Price(None, f"{kind} is not in {source}")
        per_gpu = max(per_gpu, known[kind.upper()])
    asked_cpus = cpus if resources.cpus is None else resources.cpus
    asked_gib = memory_gib if resources.memory_gib is None else resources.memory_gib
    rest = asked_cpus * listed["usd_per_cpu_hour"] + asked_gib * listed["usd_per_gib_hour"]
    times = listed["times"]
    if resources.nonpreemptible:
        rest *= times["nonpreemptible"]
    placed = 1.0
    if resources.region is not None:
        placed = times["narrow_region" if "-" in resources.region else "broad_region"]
    return Price(placed * (per_gpu * max(1, resources.gpu_count) + rest), source)


def flavor_price(flavor: str) -> Price:
    """The price of one of HF Jobs' flavors."""
    listed = table()["hf-jobs"]
    return Price(listed["usd_per_hour"].get(flavor), f"{listed['source']} ({listed['date']})")


def accelerator_price(accelerators: str) -> Price:
    """The price of a machine as SkyPilot spells its accelerators, "H100:8"."""
    listed = table()["sky"]
    return Price(listed["usd_per_hour"].get(accelerators), f"{listed['source']} ({listed['date']})")


def egress_usd_per_gb(store_uri: str) -> tuple[float | None, str]:
    """US dollars for 10^9 bytes that leave a bucket for the internet, None where unknown; and the figure's source."""
    listed = table()["egress"]
    scheme, separator, _ = store_uri.partition("://")
    if not separator or scheme in ("file", "memory"):
        return 0.0, "a folder of this machine"
    return listed["usd_per_gb"].get(scheme), f"{listed['source']} ({listed['date']})"
