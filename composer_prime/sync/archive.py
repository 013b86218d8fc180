"""What outlives the rounds: snapshots of masters, after which garbage may go, and the record that closes the run."""

import logging
from collections.abc import Sequence
from functools import partial

from composer_prime.errors import StoreError, StoreUnusable
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.garbage import collect_garbage
from composer_prime.sync.members import Members
from composer_prime.sync.protocol import run_is_over, wants_snapshot
from composer_prime.sync.records import Close
from composer_prime.sync.replica import Replica
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run
from composer_prime.sync.runtime import Runtime, Task
from composer_prime.sync.snapshots import Master, store_master
from composer_prime.sync.tape import Tape

logger = logging.getLogger(__name__)

AGAIN_S = 15.0
"""Seconds after a failed upload until the next is tried."""


class Archive:
    """One site's share in it. Used by the courier's thread; snapshots are stored by a task of their own."""

    def __init__(
        self,
        store: Store,
        run: Run,
        *,
        runtime: Runtime,
        roster: Roster,
        members: Members,
        replicas: Sequence[Replica],
        tape: Tape,
        site: str,
    ) -> None:
        self._store = store
        self._run = run
        self._runtime = runtime
        self._roster = roster
        self._members = members
        self._replicas = replicas
        self._tape = tape
        self._site = site
        self._due: dict[int, int] = {}
        self._waiting: dict[int, Master] = {}
        """By fragment, to be stored one after another, also when the rounds have gone on: where an upload outlasts
        rounds, the same fragments would be passed over again and again. At most one more copy of the masters."""
        self._again_at = float("-inf")
        self.task: Task | None = None
        """What stores a snapshot, or did."""
        self.closed = False
        """Whether the close record is known to stand."""

    def note_commit(self, fragment: int) -> None:
        """Rule 11: who commits stores the snapshot that is due after that round."""
        version = self._replicas[fragment].version + 1
        if wants_snapshot(version, self._run.terms):
            self._due[fragment] = version

    def tick(self) -> None:
        """Start what is due, and close the run once it is over."""
        self._store_snapshot()
        is_over = run_is_over([replica.version for replica in self._replicas], self._run.terms)
        if is_over and not self.closed:
            self._close_run()

    def _store_snapshot(self) -> None:
        """Start storing a snapshot that is due, beside the passes, one at a time; then garbage may go."""
        for fragment, version in list(self._due.items()):
            master = self._replicas[fragment].master
            if master.version >= version:
                del self._due[fragment]
                if master.version == version:
                    self._waiting[fragment] = master
        if (
            not self._waiting
            or self._runtime.now() < self._again_at
            or (self.task is not None and self.task.is_alive())
        ):
            return
        first = self._waiting.pop(next(iter(self._waiting)))
        self.task = self._runtime.spawn("outer-archive", partial(self._store_and_collect, first))

    def _store_and_collect(self, master: Master) -> None:
        try:
            store_master(self._store, master)
        except (StoreError, StoreUnusable) as error:
            logger.warning("snapshot_failed fragment=%d version=%d error=%s", master.fragment, master.version, error)
            self._again_at = self._runtime.now() + AGAIN_S
            self._waiting.setdefault(master.fragment, master)  # unless a newer one is due by now
            return
        try:
            if not self._run.terms.keep_log:
                collect_garbage(
                    self._store,
                    self._run,
                    master.fragment,
                    roster=self._roster,
                    members=self._members,
                    runtime=self._runtime,
                )
        except (StoreError, StoreUnusable) as error:  # with the next snapshot
            logger.warning("garbage_left fragment=%d version=%d error=%s", master.fragment, master.version, error)

    def _close_run(self) -> None:
        """Rule 11: once every fragment is final, make sure that the final masters and the close record stand."""
        masters = [replica.master for replica in self._replicas]
        if self._site not in self._roster.guests():
            self._runtime.map(self._store_if_absent, masters)
            record = Close(
                versions=tuple(master.version for master in masters),
                masters=tuple(master.sha256 for master in masters),
                voids=tuple(replica.history.voids for replica in self._replicas),
                closed_by=self._site,
            )
            if self._store.create(keys.close(), self._roster.sign(record).to_bytes()):
                self._tape.write("close", versions=record.versions, masters=record.masters)
        self.closed = True

    def _store_if_absent(self, master: Master) -> None:
        key = keys.master(master.fragment, master.version, master.sha256)
        if key not in self._store.list(key):
            store_master(self._store, master)
