"""Dollars, and the machines that platforms rent for them: rows of prices.toml and gpus.toml, each with its source."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from composer_prime.plan.traffic import traffic
from composer_prime.sync.terms import Terms

TABLE, GPUS = (
    tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8")) for name in ("prices.toml", "gpus.toml")
)
HOUR_S = 3600


@dataclass(frozen=True)
class Machine:
    """One kind of machine.

    name      a flavor's; where there are no names, the GPU's
    gpu       its GPUs' model, without spaces; "": it has none
    usd_per_hour   of the whole machine; None: unknown
    cpus, memory_gb, disk_gb   inf: as much as is asked for
    where     its cloud, in small letters, where that matters
    """

    name: str
    gpu: str
    num_gpus: float
    usd_per_hour: float | None
    cpus: float = inf
    memory_gb: float = inf
    disk_gb: float = inf
    where: str = ""

    def __str__(self) -> str:
        gpus = f"{self.num_gpus:g} x {self.gpu}, " if self.gpu else ""
        return f"{self.name} ({gpus}{self.cpus:g} CPUs, {self.memory_gb:g} GB memory, {self.disk_gb:g} GB disk)"


def listed(platform: str) -> tuple[dict[str, Any], str]:
    """A platform's table in the file, and the source of its figures with their date."""
    part = TABLE[platform]
    return part, f"{part['source']} ({part['date']})"


@cache
def shipped(platform: str) -> tuple[Machine, ...]:
    """A platform's machines in the file."""
    part = TABLE[platform]
    named = [Machine(name, *row) for name, row in part["machines"].items()]
    kinds = part.get("gpus", {}).items()
    sized = [Machine(gpu, gpu, count, count * usd) for gpu, (most, usd) in kinds for count in range(1, most + 1)]
    return (*named, *sized)


def gpu_gib(platform: str, kinds: Sequence[str], count: int) -> int:
    """GiB on `count` GPUs together, of the smallest of these kinds; 0: there is none, or that isn't known."""
    offers = offered_gib(platform)
    return min((_gib(platform, kind) * count or offers.get(kind.lower(), 0) for kind in kinds), default=0)


def offered_gib(platform: str) -> dict[str, int]:
    """GiB of GPU memory of all that a platform gives out, by name; none where it isn't known what that is."""
    machines = shipped(platform) if platform in ("hf-jobs", "modal") else ()
    names = [each.name if platform == "hf-jobs" else f"{each.num_gpus} x {each.gpu}" for each in machines]
    return {name: _gib(platform, each.gpu) * int(each.num_gpus) for name, each in zip(names, machines, strict=True)}


def _gib(platform: str, kind: str) -> int:
    name, sizes = kind.upper().replace(" ", "-"), GPUS["memory_gib"]
    return sizes.get(f"{platform} {name}", sizes.get(name, 0))


def dollars(seconds: float | None, usd_per_hour: float | None) -> float | None:
    """What that time costs; None when time or price isn't known."""
    return None if seconds is None or usd_per_hour is None else seconds / HOUR_S * usd_per_hour


def egress_usd_per_gb(store_uri: str) -> tuple[float | None, str]:
    """US dollars for 10^9 bytes that leave a bucket for the internet, None where unknown; and the figure's source."""
    scheme, separator, _ = store_uri.partition("://")
    if not separator or scheme in ("file", "memory"):
        return 0.0, "a folder of this machine"
    prices, source = listed("egress")
    return prices["usd_per_gb"].get(scheme), source


def egress_line(terms: Terms, numels: Sequence[int], num_sites: int, uri: str) -> str | None:
    """The bytes that all sites fetch from the bucket in the whole run, and their cost; None for a folder."""
    usd_per_gb, source = egress_usd_per_gb(uri)
    if usd_per_gb == 0:
        return None
    gb = terms.rounds * num_sites * traffic(terms, numels, num_sites).down_bytes / 1e9
    cost = "at an unknown price" if usd_per_gb is None else f"${gb * usd_per_gb:.2f} where egress is charged"
    return f"bucket traffic: all sites fetch {gb:.2f} GB in {terms.rounds} rounds, joins not counted, {cost} ({source})"
