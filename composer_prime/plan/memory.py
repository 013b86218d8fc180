"""Memory that a site holds, counted by parameters, and what the machine, container or job has of it.

Activations, the buffers of a round under way, and what Python and torch take come on top; they are unknown beforehand.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.errors import MachineUnfit
from composer_prime.sync.terms import Terms

MEMINFO, CGROUPS, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
GIB = 2**30
FP32 = 4
TRAINER_BYTES = {"adamw": 4 * FP32, "muon": 3 * FP32}
"""A parameter's in an embedded trainer: weights, gradient, and Adam's two moments, or of a matrix Muon's one."""


def outer_bytes(terms: Terms, numel: int) -> int:
    """What an outer loop holds between two rounds: masters, and what coding left for the next offer."""
    from composer_prime.outer.codecs import get_codec

    residual = FP32 * numel if terms.error_feedback and get_codec(terms.codec).lossy else 0
    return terms.master_nbytes(numel) + residual


def host_bytes(recipe: RecipeBase, terms: Terms, numel: int) -> int:
    """What a site's processes hold of `numel` parameters in the machine's memory. PRIME-RL's own is not known."""
    if not isinstance(recipe, Recipe):
        return outer_bytes(terms, numel)
    models = 1  # the inference server's
    if recipe.hints is not None and recipe.hints.base_url is None:
        models += int(recipe.hints.is_held) + int(recipe.hints.teacher == "ema")
    return outer_bytes(terms, numel) + (TRAINER_BYTES[recipe.trainer.optim.type] + models * FP32) * numel


def check_memory(terms: Terms, numel: int) -> None:
    """Raise MachineUnfit unless this machine has free what the outer loop holds on a PRIME-RL trainer's first rank."""
    needed, (_, free) = outer_bytes(terms, numel), memory()
    if needed > free:
        raise MachineUnfit(
            f"the outer loop holds {needed / GIB:.2f} GiB of memory on the machine of this trainer's first rank "
            f"({numel:,} parameters), and {free / GIB:.2f} GiB are free there: take a machine or a job with more"
        )


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
