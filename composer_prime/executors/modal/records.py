"""Which call of Modal's is which job: one modal.Dict a run, whose entries decide who may run what.

Modal has no name for a call, so a caller killed after `spawn` could lose it, or start it twice. Here each job has
create-once entries, and a container looks at them before it does any work:

    {job}/claim   run, site, attempt, timeout_s, claimed_at: written before `spawn`, so that `find` sees the job
    {job}/call    the one call that may run it: the first to be written, by a caller after `spawn` or by a container at
                  its start; "" when it was cancelled while it had none. Containers of any other call end at once
    {job}/start   the container that ran it; a second one of the same call finds it and ends at once ("preempted")
    {job}/end     that Modal took that container back
    {job}/cancel  that somebody asked for the end

Modal drops entries that nobody read or wrote for seven days; a job has ended long before.
"""

import hashlib
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from composer_prime.executors.base import JobSpec
from composer_prime.executors.modal.client import Connection, modal_package

T = TypeVar("T")
PREFIX = "composer-prime-"
NAME_LIMIT = 64
RUN_CHARACTERS = 36
NO_CALL = ""
CREATE_ONCE = ("claim", "call", "start")


def object_name(run: str, suffix: str = "") -> str:
    """The name of a run's object on Modal: at most 64 characters, long run names shortened by their hash."""
    if len(run) > RUN_CHARACTERS:
        run = f"{run[: RUN_CHARACTERS - 11]}-{hashlib.sha256(run.encode()).hexdigest()[:10]}"
    name = PREFIX + run + (f"-{suffix}" if suffix else "")
    if len(name) > NAME_LIMIT:
        raise ValueError(f"{name} is longer than {NAME_LIMIT} characters")
    return name


class Records:
    """The entries of one run."""

    def __init__(self, connection: Connection, run: str) -> None:
        self.name = object_name(run)
        self._connection = connection
        self._dict: Any = None
        self._settled: dict[str, Any] = {}

    def create(self) -> None:
        """Make the Dict, unless the run has one."""
        entries = self._lookup(create_if_missing=True)
        self._connection.ask(self._what, entries.hydrate)
        self._dict = entries

    def get(self, job: str, entry: str) -> Any:
        """An entry of a job, None if there is none. Raises JobUnknown when the run has no Dict."""
        key = f"{job}/{entry}"
        if key in self._settled:
            return self._settled[key]
        value = self._ask(lambda entries: entries.get(key))
        if value is not None and entry in CREATE_ONCE:
            self._settled[key] = value
        return value

    def first(self, job: str, entry: str, value: T) -> T:
        """The value that the entry has for good: `value`, or what was written before."""

        def put_and_get(entries: Any) -> T:
            # Not what `put` returns: it says False too when its own first attempt was written and the answer lost.
            entries.put(f"{job}/{entry}", value, skip_if_exists=True)
            return entries.get(f"{job}/{entry}")

        return self._ask(put_and_get)

    def claim(self, spec: JobSpec, now: float) -> None:
        """Make the job known before it exists."""
        claim = {"run": spec.run, "site": spec.site, "attempt": spec.attempt}
        self.first(spec.name, "claim", {**claim, "timeout_s": spec.timeout_s, "claimed_at": now})

    def claims(self) -> dict[str, dict[str, Any]]:
        """Job name -> claim, of all jobs. Raises JobUnknown when the run has no Dict."""
        entries = self._ask(lambda entries: list(entries.items()))
        return {key.removesuffix("/claim"): value for key, value in entries if key.endswith("/claim")}

    def salt(self) -> str:
        """What keeps the names of a run's apps from telling anything of its secrets."""
        return self.first("run", "salt", secrets.token_hex(16))

    @property
    def _what(self) -> str:
        return f"records {self.name}"

    def _lookup(self, *, create_if_missing: bool = False) -> Any:
        names = modal_package().Dict
        return names.from_name(self.name, create_if_missing=create_if_missing, client=self._connection.client)

    def _ask(self, request: Callable[[Any], T]) -> T:
        entries = self._dict or self._lookup()
        answer = self._connection.ask(self._what, lambda: request(entries))
        # Kept once it is known to exist: it has looked itself up, and needn't again.
        self._dict = entries
        return answer
