"""Which flavor of machine a Hugging Face job gets: the cheapest that has what was asked for.

The list comes from the service (`GET /api/jobs/hardware`); the table below stands in where that can't be had, so that
a dry run needs no network: `hf jobs hardware` as huggingface.co/docs/hub/jobs-configuration shows it, 2026-11-22.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.executors.base import Resources
from composer_prime.executors.prices import flavor_price


@dataclass(frozen=True)
class Flavor:
    """One kind of machine.

    gpu      its accelerator's model as the service spells it, "H200"; None: none
    num_gpus, num_cpus, memory_gb, disk_gb   of the machine
    usd_per_hour   0 or more; None: unknown
    """

    name: str
    gpu: str | None
    num_gpus: int
    num_cpus: float
    memory_gb: float
    disk_gb: float
    usd_per_hour: float | None

    def __str__(self) -> str:
        gpus = f"{self.num_gpus} x {self.gpu}, " if self.gpu else ""
        return f"{self.name} ({gpus}{self.num_cpus:g} CPUs, {self.memory_gb:g} GB memory, {self.disk_gb:g} GB disk)"


def _row(name: str, gpus: str, cpus: int, memory_gb: int, disk_gb: int) -> Flavor:
    count, _, gpu = gpus.partition(" ")
    return Flavor(name, gpu or None, int(count), cpus, memory_gb, disk_gb, flavor_price(name).usd_per_hour)


TABLE = (
    _row("cpu-basic", "0", 2, 16, 50),
    _row("cpu-upgrade", "0", 8, 32, 50),
    _row("cpu-xl", "0", 16, 124, 1000),
    _row("cpu-performance", "0", 32, 256, 1024),
    _row("t4-small", "1 T4", 4, 15, 50),
    _row("t4-medium", "1 T4", 8, 30, 100),
    _row("l4x1", "1 L4", 8, 30, 400),
    _row("l4x4", "4 L4", 48, 186, 3200),
    _row("a10g-small", "1 A10G", 4, 15, 110),
    _row("a10g-large", "1 A10G", 12, 46, 200),
    _row("a10g-largex2", "2 A10G", 24, 92, 1000),
    _row("a10g-largex4", "4 A10G", 48, 184, 2000),
    _row("l40sx1", "1 L40S", 8, 62, 380),
    _row("l40sx4", "4 L40S", 48, 382, 3200),
    _row("l40sx8", "8 L40S", 192, 1534, 6500),
    _row("a100-large", "1 A100", 12, 142, 1000),
    _row("a100x4", "4 A100", 48, 568, 4000),
    _row("a100x8", "8 A100", 96, 1136, 8000),
    _row("rtx-pro-6000", "1 RTX PRO 6000", 23, 256, 475),
    _row("rtx-pro-6000x2", "2 RTX PRO 6000", 46, 512, 950),
    _row("rtx-pro-6000x4", "4 RTX PRO 6000", 92, 1024, 1900),
    _row("rtx-pro-6000x8", "8 RTX PRO 6000", 184, 2048, 3800),
    _row("h200", "1 H200", 23, 256, 3000),
    _row("h200x2", "2 H200", 46, 512, 6000),
    _row("h200x4", "4 H200", 92, 1024, 12000),
    _row("h200x8", "8 H200", 184, 2048, 24000),
)

_PER_HOUR = {"second": 3600.0, "minute": 60.0, "hour": 1.0}


def from_service(hardware: Iterable[Any]) -> tuple[Flavor, ...]:
    """Flavors out of the client's `JobHardwareInfo` records."""
    return tuple(_flavor_of(each) for each in hardware)


def _flavor_of(hardware: Any) -> Flavor:
    accelerator = hardware.accelerator
    per_hour = _PER_HOUR.get(hardware.unit_label)
    return Flavor(
        name=hardware.name,
        gpu=accelerator.model if accelerator else None,
        num_gpus=int(_number(accelerator.quantity)) if accelerator else 0,
        num_cpus=_number(hardware.cpu),
        memory_gb=_number(hardware.ram),
        disk_gb=_number(hardware.ephemeral_storage),
        usd_per_hour=None if per_hour is None else round(hardware.unit_cost_usd * per_hour, 2),
    )


def _number(text: str) -> float:
    """The figure at the start of "142 GB"; 0 where there is none ("N/A"), so that nothing fits by mistake."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)", str(text))
    return float(match.group(1)) if match else 0.0


def choose(flavors: Sequence[Flavor], wanted: Resources) -> Flavor:
    """The cheapest flavor that has what is wanted; `wanted.gpu` is a GPU's model or a flavor's name.

    Raises BadInput for a GPU, a count or a size that no flavor has.
    """
    same = _named(flavors, wanted)
    fitting = [flavor for flavor in same if _fits(flavor, wanted)]
    if not fitting:
        raise BadInput(f"{_asked(wanted)} is more than any flavor has, of {'; '.join(map(str, same))}: ask for less")
    return min(fitting, key=lambda flavor: (flavor.usd_per_hour is None, flavor.usd_per_hour, flavor.num_cpus))


def _named(flavors: Sequence[Flavor], wanted: Resources) -> list[Flavor]:
    """The flavors with the GPUs that are wanted, however large the rest of the machine is."""
    if wanted.gpu is None:
        return [flavor for flavor in flavors if flavor.gpu is None]
    asked = _plain(wanted.gpu)
    count = wanted.gpu_count or 1
    if of_model := [flavor for flavor in flavors if flavor.gpu and _plain(flavor.gpu) == asked]:
        if of_count := [flavor for flavor in of_model if flavor.num_gpus == count]:
            return of_count
        counts = ", ".join(str(each) for each in sorted({flavor.num_gpus for flavor in of_model}))
        raise BadInput(f"{count} x {wanted.gpu}: Hugging Face Jobs has machines with {counts} of them: ask for one")
    if by_name := [flavor for flavor in flavors if _plain(flavor.name) == asked]:
        if count not in (1, by_name[0].num_gpus):  # one machine of it, or the number of its GPUs
            raise BadInput(f"{count} x {wanted.gpu}: this flavor has {by_name[0].num_gpus} GPUs: leave the count out")
        return by_name
    raise BadInput(f"Hugging Face Jobs has no GPU or flavor {wanted.gpu!r}: {_nearest(flavors, wanted.gpu)}")


def _nearest(flavors: Sequence[Flavor], asked: str) -> str:
    models = sorted({flavor.gpu for flavor in flavors if flavor.gpu})
    names = {_plain(name): name for name in [*(flavor.name for flavor in flavors), *models]}
    near = [names[each] for each in difflib.get_close_matches(_plain(asked), names, n=3, cutoff=0.7)]
    return f"nearest are {', '.join(near)}" if near else f"it has {', '.join(models)}"


def _fits(flavor: Flavor, wanted: Resources) -> bool:
    return (
        flavor.num_cpus >= (wanted.cpus or 0)
        and flavor.memory_gb >= (wanted.memory_gib or 0)
        and flavor.disk_gb >= (wanted.disk_gib or 0)
    )


def _asked(wanted: Resources) -> str:
    sizes = ((wanted.cpus, "CPUs"), (wanted.memory_gib, "GiB of memory"), (wanted.disk_gib, "GiB of disk"))
    return " with ".join(
        [
            *([f"{wanted.gpu_count or 1} x {wanted.gpu}"] if wanted.gpu else []),
            " and ".join(f"{size:g} {unit}" for size, unit in sizes if size is not None),
        ]
    )


def _plain(name: str) -> str:
    """A name without case and punctuation: "RTX PRO 6000" and "rtx-pro-6000" are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
