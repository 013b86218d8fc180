"""The memory of the machine, or of the container or job in it, that this process runs in."""

import os
from collections.abc import Iterator
from pathlib import Path

from composer_prime.errors import MachineUnfit
from composer_prime.outer.forecast import host_bytes

MEMINFO, CGROUPS, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
GIB = 2**30


def memory() -> tuple[int, int]:
    """(all, free) bytes of memory; the limits of this process's control groups count."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass  # not Linux: what is free isn't told, and all there is counts
    for path in _limits():
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):
            continue  # no such file, or "max"
        total, free = min(total, limit), min(free, limit)
    return total, free


def check_memory(numel: int, fragments: int, *, momentum: bool) -> None:
    """Raise MachineUnfit unless this machine has what the outer loop needs on a PRIME-RL trainer's first rank."""
    needed = host_bytes(numel, -(-numel // fragments), momentum=momentum).closing
    _, free = memory()
    if needed > free:
        raise MachineUnfit(
            f"the outer loop needs {needed / GIB:.2f} GiB of memory on the machine of this trainer's first rank "
            f"({numel:,} parameters, outer.fragments {fragments}), and {free / GIB:.2f} GiB are free there: take a "
            "machine or a job with more, or make a run of more fragments"
        )


def _limits() -> Iterator[Path]:
    """The files with the limits of our control groups, of both versions, from the innermost outwards."""
    try:
        groups = [line.split(":", 2) for line in OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, group in groups:
        root, name = CGROUPS, "memory.max"
        if controllers:
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        if controllers in ("", "memory"):
            inner = root / group.lstrip("/")
            yield from (place / name for place in (inner, *inner.parents) if place.is_relative_to(root))
