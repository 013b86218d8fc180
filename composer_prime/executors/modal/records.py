"""Which call of Modal's is which job: one modal.Dict a run, whose entries decide who may run what.

Modal has no name for a call, so a caller killed after `spawn` could lose it, or start it twice. Here each job has
create-once entries, and a container looks at them before it does any work:

    {job}/claim   when the job was claimed: written before `spawn`, so that `find` sees the job
    {job}/call    the one call that may run it: the first to be written, by a caller after `spawn` or by a container at
                  its start; "" when it was cancelled while it had none. Containers of any other call end at once
    {job}/start   the container that ran it; a second one of the same call finds it and ends at once ("preempted")
    {job}/end     that Modal took that container back
    {job}/cancel  when somebody asked for the end

Modal drops entries that nobody read or wrote for seven days; a job has ended long before.
"""

import hashlib
from typing import Any, TypeVar

import modal

from composer_prime.executors.modal.client import Connection

T = TypeVar("T")
PREFIX = "composer-prime-"
RUN_CHARACTERS = 36
"""What is left of Modal's 64 for a run's name, beside the prefix and a hash of 12 digits."""
NO_CALL = ""


def object_name(run: str) -> str:
    """The name of a run's object on Modal, with room for a suffix: long run names are shortened by their hash."""
    if len(run) > RUN_CHARACTERS:
        run = f"{run[: RUN_CHARACTERS - 11]}-{hashlib.sha256(run.encode()).hexdigest()[:10]}"
    return PREFIX + run


class Records:
    """The entries of one run. Its methods but `create` raise JobUnknown when the run has no Dict."""

    def __init__(self, connection: Connection, run: str) -> None:
        self.name = object_name(run)
        self._connection = connection
        self._dict = modal.Dict.from_name(self.name, client=connection.client)

    def create(self) -> None:
        """Make the Dict, unless the run has one."""
        client = self._connection.client
        make = modal.Dict.objects.create
        self._connection.ask(f"records {self.name}", lambda: make(self.name, allow_existing=True, client=client))

    def get(self, job: str, entry: str) -> Any:
        """An entry of a job, None if there is none."""
        return self._connection.ask(f"records {self.name}", lambda: self._dict.get(f"{job}/{entry}"))

    def first(self, job: str, entry: str, value: T) -> T:
        """The value that the entry has for good: `value`, or what was written before."""

        def put_and_get() -> T:
            # Not what `put` returns: it says False too when its own first attempt was written and the answer lost.
            self._dict.put(f"{job}/{entry}", value, skip_if_exists=True)
            return self._dict.get(f"{job}/{entry}")

        return self._connection.ask(f"records {self.name}", put_and_get)

    def claimed(self) -> list[str]:
        """The names of all jobs."""
        keys = self._connection.ask(f"records {self.name}", lambda: list(self._dict.keys()))
        return [key.removesuffix("/claim") for key in keys if key.endswith("/claim")]
