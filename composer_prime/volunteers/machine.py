"""What this machine has: cores, memory, and torch with its GPUs, which a process of its own is asked for.

That process is this module: `python -m composer_prime.volunteers.machine` prints one line of JSON. So a torch or driver
that is broken ends in a line that says so, and not in a crash.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass

from composer_prime.plan.memory import memory

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

    test_vector   what the outer loop's arithmetic gives here, which must be what it gives at the other sites
    """

    version: str
    test_vector: str
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Machine:
    """One machine, as seen from this process.

    cores             that this process may use
    free_memory_bytes   that may be had now, without swapping. A container's limit counts
    torch             None: it can't be used, and `torch_problem` says why
    """

    python: str
    cores: int
    free_memory_bytes: int
    torch: Torch | None
    torch_problem: str = ""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those that torch can use."""
        return self.torch.gpus if self.torch else ()


def look() -> Machine:
    """This machine now. Takes a few seconds, most of them torch's."""
    torch, problem = ask_torch()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(platform.python_version(), cores, memory()[1], torch, problem)


def ask_torch() -> tuple[Torch | None, str]:
    """What torch says in a process of its own; None and the cause where that fails."""
    command = [sys.executable, "-m", "composer_prime.volunteers.machine"]
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


def main() -> None:
    """Print what torch is here."""
    import torch

    from composer_prime.outer.arithmetic import test_vector

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    report = {
        "version": torch.__version__,
        "test_vector": test_vector(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
