"""What a platform must offer to be tested: a loopback of it on this machine, on which each job is a real subprocess.

Loopbacks are met only through the vendor's own client, as the real platform would be.
"""

from contextlib import AbstractContextManager
from typing import Literal, Protocol

from composer_prime.executors.base import Executor, Job

Trouble = Literal["429", "503", "reset", "slow"]
"""How a request goes wrong: refused as too many, refused as broken, its connection cut, answered late (about 2 s)."""


class LoopbackPlatform(Protocol):
    """One platform on this machine, empty at the start."""

    @property
    def name(self) -> str:
        """The executor's `platform`."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether there is an API that can fail; False where a job is started by this machine itself."""
        ...

    @property
    def has_queue(self) -> bool:
        """Whether a job may wait for a machine."""
        ...

    def executor(self) -> Executor:
        """A new client, which knows nothing of the others."""
        ...

    def environment(self) -> dict[str, str]:
        """Environment variables with which a fresh process's own client reaches this loopback and no other."""
        ...

    def launch_option(self) -> str:
        """What stands after `--on` to reach it, in a process with `environment`."""
        ...

    def pids(self, job: Job) -> list[int]:
        """The job's live processes, its command's children among them."""
        ...

    def preempt(self, job: Job) -> None:
        """Take the machine back under a running job, as this platform does it; returns when its processes are gone."""
        ...

    def trouble(self, kind: Trouble, count: int) -> None:
        """Let the next `count` requests go wrong. Only where `has_requests`."""
        ...

    def hold_pending(self) -> AbstractContextManager[None]:
        """Jobs submitted within stay pending until it ends. Only where `has_queue`."""
        ...

    def close(self) -> None:
        """End everything that still runs, and the loopback."""
        ...
