"""The machines that platforms have, and their prices: a choice from a platform's own list, or else from prices.toml.

Both are rows of one kind, so that all platforms refuse what they don't have in the same words.
"""

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.executors.base import Resources, gpu_kinds

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("prices.toml").read_text(encoding="utf-8"))


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


def fitting(machines: Sequence[Machine], wanted: Resources, platform: str) -> list[Machine]:
    """The machines that have what is wanted, those with the first kind of GPU first; a name stands for one machine.

    platform   as people call it. Raises BadInput, with the nearest, for a GPU, a count or a size that it doesn't have
    """
    same = [each for each in machines if not each.gpu]
    if kinds := gpu_kinds(wanted):
        same = [each for kind in kinds for each in _with_gpus(machines, kind, wanted.gpu_count or 1, platform)]
    sizes = (
        (wanted.cpus or 0, "cpus", "CPUs"),
        (wanted.memory_gib or 0, "memory_gb", "GiB of memory"),
        (wanted.disk_gib or 0, "disk_gb", "GiB of disk"),
    )
    if found := [each for each in same if all(getattr(each, field) >= size for size, field, _ in sizes)]:
        return found
    asked = " and ".join(f"{size:g} {unit}" for size, _, unit in sizes if size)
    raise BadInput(f"{asked}: {platform} has no such machine, of {'; '.join(map(str, same))}: ask for less")


def cheapest(machines: Sequence[Machine], wanted: Resources, platform: str) -> Machine:
    """Of those that fit. Raises as `fitting`."""
    found = fitting(machines, wanted, platform)
    return min(found, key=lambda each: (each.usd_per_hour is None, each.usd_per_hour, each.cpus))


def _with_gpus(machines: Sequence[Machine], kind: str, count: int, platform: str) -> list[Machine]:
    asked = kind.replace(" ", "-").lower()
    same = [each for each in machines if each.gpu.lower() == asked]
    named = [each for each in machines if each.name.lower() == asked]
    if named and not same and count == 1:
        return named  # one machine, whatever the number of its GPUs
    if not (same := same or named):
        names = {name.lower(): name for each in machines for name in (each.name, each.gpu) if name}
        near = [names[each] for each in difflib.get_close_matches(asked, names, n=3, cutoff=0.5)]
        shown = f"nearest are {', '.join(near)}" if near else f"it has {', '.join(sorted(names.values())) or 'none'}"
        raise BadInput(f"{platform} has no GPU {kind!r}: {shown}")
    if found := [each for each in same if each.num_gpus == count]:
        return found
    counts = ", ".join(f"{each:g}" for each in sorted({each.num_gpus for each in same}))
    raise BadInput(f"{count} x {kind}: {platform} has machines with {counts} of them: ask for one")


def egress_usd_per_gb(store_uri: str) -> tuple[float | None, str]:
    """US dollars for 10^9 bytes that leave a bucket for the internet, None where unknown; and the figure's source."""
    scheme, separator, _ = store_uri.partition("://")
    if not separator or scheme in ("file", "memory"):
        return 0.0, "a folder of this machine"
    prices, source = listed("egress")
    return prices["usd_per_gb"].get(scheme), source
