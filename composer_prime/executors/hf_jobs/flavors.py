"""Which flavor of machine a Hugging Face job gets: the cheapest that has what was asked for.

The list comes from the service (`GET /api/jobs/hardware`). Where that can't be had, as in a dry run without a network,
prices.toml stands in.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer_prime.errors import BadInput
from composer_prime.executors.base import Resources
from composer_prime.executors.prices import listed, with_gpus

if TYPE_CHECKING:
    from huggingface_hub import JobHardwareInfo


@dataclass(frozen=True)
class Flavor:
    """One kind of machine.

    gpu      its accelerator's model, with dashes for the spaces of the service, "RTX-PRO-6000"; "": none
    num_gpus, num_cpus, memory_gb, disk_gb   of the machine
    usd_per_hour   0 or more; None: unknown
    """

    name: str
    gpu: str
    num_gpus: int
    num_cpus: float
    memory_gb: float
    disk_gb: float
    usd_per_hour: float | None

    def __str__(self) -> str:
        gpus = f"{self.num_gpus} x {self.gpu}, " if self.gpu else ""
        return f"{self.name} ({gpus}{self.num_cpus:g} CPUs, {self.memory_gb:g} GB memory, {self.disk_gb:g} GB disk)"


TABLE = tuple(Flavor(name, *row) for name, row in listed("hf-jobs")[0]["flavors"].items())


def from_service(hardware: "JobHardwareInfo") -> Flavor:
    """A flavor as the service lists it."""
    accelerator = hardware.accelerator
    return Flavor(
        name=hardware.name,
        gpu=accelerator.model.replace(" ", "-") if accelerator else "",
        num_gpus=int(_number(accelerator.quantity)) if accelerator else 0,
        num_cpus=_number(hardware.cpu),
        memory_gb=_number(hardware.ram),
        disk_gb=_number(hardware.ephemeral_storage),
        usd_per_hour=round(hardware.unit_cost_usd * 60, 2) if hardware.unit_label == "minute" else None,
    )


def _number(text: str) -> float:
    """The figure at the start of "142 GB"; 0 where there is none ("N/A"), so that nothing fits by mistake."""
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match[0]) if match else 0.0


def choose(flavors: Sequence[Flavor], wanted: Resources) -> Flavor:
    """The cheapest flavor that has what is wanted; `wanted.gpu` is a GPU's model or a flavor's name.

    Raises BadInput for a GPU, a count or a size that no flavor has.
    """
    same = _with_gpus(flavors, wanted)
    sizes = (
        (wanted.cpus or 0, "num_cpus", "CPUs"),
        (wanted.memory_gib or 0, "memory_gb", "GiB of memory"),
        (wanted.disk_gib or 0, "disk_gb", "GiB of disk"),
    )
    fitting = [each for each in same if all(getattr(each, field) >= size for size, field, _ in sizes)]
    if not fitting:
        asked = " and ".join(f"{size:g} {unit}" for size, _, unit in sizes if size)
        raise BadInput(f"{asked} is more than any flavor has, of {'; '.join(map(str, same))}: ask for less")
    return min(fitting, key=lambda flavor: (flavor.usd_per_hour is None, flavor.usd_per_hour, flavor.num_cpus))


def _with_gpus(flavors: Sequence[Flavor], wanted: Resources) -> Sequence[Flavor]:
    """The flavors with the GPUs that are wanted, however large the rest of the machine is."""
    if wanted.gpu is None:
        return [flavor for flavor in flavors if not flavor.gpu]
    asked, count = wanted.gpu.replace(" ", "-"), wanted.gpu_count or 1
    named = [flavor for flavor in flavors if flavor.name == asked.lower() != flavor.gpu.lower()]
    if named and count == 1:  # one machine of a flavor, whatever the number of its GPUs
        return named
    known = {flavor.name: [flavor] for flavor in flavors}
    for flavor in flavors:
        if flavor.gpu:
            known.setdefault(flavor.gpu, []).append(flavor)
    return with_gpus(known, asked, count, "Hugging Face Jobs")
