"""What platforms offer: prices.toml, one dated file, for those that don't tell it themselves; and a choice from it."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.executors.base import Price, Resources, gpu_kinds

_FILE = Path(__file__).with_name("prices.toml")


@cache
def table() -> dict[str, Any]:
    """The file as it stands."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def listed(platform: str) -> tuple[dict[str, Any], str]:
    """A platform's table in the file, and the source of its figures with their date."""
    part = table()[platform]
    return part, f"{part['source']} ({part['date']})"


def with_gpus(known: Mapping[str, Sequence[Any]], kind: str, count: int, platform: str) -> list[Any]:
    """The machines with so many GPUs of a kind, in any case. Raises BadInput with the nearest kinds, or the counts.

    known   a name that may be asked for -> its machines, which have `num_gpus`
    """
    names = {name.lower(): name for name in known}
    if kind.lower() not in names:
        near = [names[each] for each in difflib.get_close_matches(kind.lower(), names, n=3, cutoff=0.5)]
        shown = f"nearest are {', '.join(near)}" if near else f"it has {', '.join(sorted(known)) or 'none'}"
        raise BadInput(f"{platform} has no GPU {kind!r}: {shown}")
    machines = known[names[kind.lower()]]
    if found := [machine for machine in machines if machine.num_gpus == count]:
        return found
    counts = ", ".join(f"{each:g}" for each in sorted({machine.num_gpus for machine in machines}))
    raise BadInput(f"{count} x {kind}: {platform} has machines with {counts} of them: ask for one")


def modal_price(resources: Resources, *, cpus: float = 0.125, memory_gib: float = 0.125) -> Price:
    """A Modal container's price, with the dearest of the GPUs that may serve it.

    cpus, memory_gib   the platform's defaults, where `resources` say nothing
    """
    prices, source = listed("modal")
    known = {name.upper(): price for name, price in prices["usd_per_gpu_hour"].items()}
    per_gpu = 0.0
    for kind in gpu_kinds(resources):
        if kind.upper() not in known:
            return Price(None, f"{kind} is not in {source}")
        per_gpu = max(per_gpu, known[kind.upper()])
    asked_cpus = cpus if resources.cpus is None else resources.cpus
    asked_gib = memory_gib if resources.memory_gib is None else resources.memory_gib
    rest = asked_cpus * prices["usd_per_cpu_hour"] + asked_gib * prices["usd_per_gib_hour"]
    times = prices["times"]
    if resources.nonpreemptible:
        rest *= times["nonpreemptible"]
    placed = 1.0
    if resources.region is not None:
        placed = times["narrow_region" if "-" in resources.region else "broad_region"]
    return Price(placed * (per_gpu * max(1, resources.gpu_count) + rest), source)


def egress_usd_per_gb(store_uri: str) -> tuple[float | None, str]:
    """US dollars for 10^9 bytes that leave a bucket for the internet, None where unknown; and the figure's source."""
    scheme, separator, _ = store_uri.partition("://")
    if not separator or scheme in ("file", "memory"):
        return 0.0, "a folder of this machine"
    prices, source = listed("egress")
    return prices["usd_per_gb"].get(scheme), source
