"""What this machine has: cores, memory, disk, Python, and torch with its GPUs, which a process of its own is asked for.

No torch here: one that is broken must end in a line that says so, and not in a crash.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from composer_prime.sites.memory import memory

TORCH_TIMEOUT_S = 120
"""Importing torch from a cold disk takes its time."""


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Torch:
    """What torch said of itself.

    flops         fp32 operations a second of one thread, measured
    test_vector   what the outer loop's arithmetic gives here, which must be what it gives at the other sites
    """

    version: str
    flops: float
    test_vector: str
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Machine:
    """One machine, as seen from this process.

    cores             that this process may use
    memory_bytes      of all; `free_memory_bytes` may be had now, without swapping. A container's limit counts
    free_disk_bytes   where the volunteer's folder is, or will be
    torch             None: it can't be used, and `torch_problem` says why
    """

    python: str
    cores: int
    memory_bytes: int
    free_memory_bytes: int
    free_disk_bytes: int
    torch: Torch | None
    torch_problem: str = ""


def look(folder: Path) -> Machine:
    """This machine now. Takes a few seconds, most of them torch's."""
    torch, problem = ask_torch()
    total, free = memory()
    return Machine(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=total,
        free_memory_bytes=free,
        free_disk_bytes=shutil.disk_usage(_existing(folder)).free,
        torch=torch,
        torch_problem=problem,
    )


def ask_torch() -> tuple[Torch | None, str]:
    """What `torch_report` finds in a process of its own; None and the cause where that fails."""
    command = [sys.executable, "-m", "composer_prime.volunteers.torch_report"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"importing torch took more than {TORCH_TIMEOUT_S} s"
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return None, said[-1] if said else f"torch ended its process (exit code {done.returncode})"
    found = json.loads(done.stdout.splitlines()[-1])
    gpus = tuple(Gpu(**gpu) for gpu in found.pop("gpus"))
    return Torch(**found, gpus=gpus), ""


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
