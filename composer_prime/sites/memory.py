"""The memory of the machine, or of the container or job in it, that this process runs in."""

import os
from collections.abc import Iterator, Sequence
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
        total, free = min(total, limit), min(free, max(0, limit - _held(path.parent)))
    return total, free


def _held(group: Path) -> int:
    """Bytes that a control group uses and can't give back at once, as Kubernetes reckons them."""
    for used, cached in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        try:
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return int((group / used).read_text()) - int(counts[cached])
        except (OSError, KeyError, ValueError):
            continue  # the other version's names
    return 0


def check_memory(fragments: Sequence[int], *, momentum: bool) -> None:
    """Raise MachineUnfit unless this machine has what the outer loop needs on a PRIME-RL trainer's first rank.

    fragments   parameters of each
    """
    numel = sum(fragments)
    needed = host_bytes(numel, max(fragments), momentum=momentum).closing
    _, free = memory()
    if needed > free:
        raise MachineUnfit(
            f"the outer loop needs {needed / GIB:.2f} GiB of memory on the machine of this trainer's first rank "
            f"({numel:,} parameters, outer.fragments {len(fragments)}), and {free / GIB:.2f} GiB are free there: take "
            "a machine or a job with more"
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
