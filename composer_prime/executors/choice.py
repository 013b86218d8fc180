"""A choice of the machines that a platform has: all platforms refuse what they don't have in the same words."""

import difflib
from collections.abc import Sequence

from composer_prime.errors import BadInput
from composer_prime.executors.base import Resources, gpu_kinds
from composer_prime.plan.prices import Machine


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
