"""Rule 11: a joiner reads the newest masters and the commits since beside its training, and offers once it has them.

Until then it is a learner: it trains on what it holds of the run, for H inner steps at most, so that its movement stays
bounded, and offers nothing. A small run is read before training begins. Nothing is fetched that the process holds.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from composer_prime.errors import StoreError, StoreUnusable
from composer_prime.store.base import Store
from composer_prime.sync.courier import Courier
from composer_prime.sync.driver import CLOSE_S, DENIED_S, RETRY_S
from composer_prime.sync.entering import BEATS_PER_LIVENESS, Entered
from composer_prime.sync.journal import Journal
from composer_prime.sync.members import Members
from composer_prime.sync.replica import Replica
from composer_prime.sync.runtime import Runtime, Task, side_by_side
from composer_prime.sync.snapshots import Master, vouched_sha, vouched_snapshots

logger = logging.getLogger(__name__)

READING_S = 5.0
"""Seconds that a join waits for whole masters before training begins on what the process holds of the run."""
FOLLOW_S = 0.5
"""Seconds between two looks at the log, once the masters are whole and until the training thread takes them."""


@dataclass(frozen=True)
class Held:
    """What a process brings along, by fragment: a version, and values, fp32 [n], that may be its master.

    of_run   whether they are known to be the run's, by a checkpoint of it

    Nobody writes to the values afterwards.
    """

    values: Sequence[tuple[int, Tensor]]
    of_run: bool = False


class Present:
    """The masters as the log has them now, read into a courier. `read` goes on where it was after an error."""

    def __init__(
        self,
        store: Store,
        entered: Entered,
        *,
        runtime: Runtime,
        held: Held | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._store = store
        self._entered = entered
        self._held = held
        self._runtime = runtime
        self._journal = journal
        self._replicas: dict[int, Replica] = {}
        self._courier: Courier | None = None
        self._known: Mapping[int, Master] | None = None

    def holds_run(self) -> bool:
        """Whether what was brought along is the run's, so that movement from there is movement of its policy."""
        held, first = self._held, self._entered.run.manifest.masters
        if held is None or held.of_run:
            return held is not None
        known = self._masters()
        return all(index in known and known[index].sha256 == sha for index, sha in enumerate(first))

    def _masters(self) -> Mapping[int, Master]:
        """What was brought along as masters; their hashes tell whether they are. A site keeps no outer momentum."""
        if self._known is None:
            has_momentum = self._entered.run.terms.has_momentum
            self._known = {
                index: Master(index, version, values, torch.zeros_like(values) if has_momentum else None)
                for index, (version, values) in enumerate([] if self._held is None else self._held.values)
                if version == 0 or not has_momentum
            }
        return self._known

    def read(self) -> Courier:
        """Come to the present. Raises StoreError (call again), CorruptObject where the bucket has no sound snapshot."""
        if self._courier is None:
            self._open_all([one.index for one in self._entered.run.fragments if one.index not in self._replicas])
            self._courier = self._make_courier()
            self._known = self._held = None
        self._courier.catch_up()
        return self._courier

    def _open_all(self, fragments: Sequence[int]) -> None:
        """Over a slow link one after another, each from the newest snapshot by then: less log is left."""
        began = self._runtime.now()
        for at, fragment in enumerate(fragments):
            self._open(fragment)
            if (self._runtime.now() - began) * (len(fragments) - at) < READING_S:
                left = [partial(self._open, one) for one in fragments[at + 1 :]]
                side_by_side(self._runtime, "outer-masters", left)
                return

    def _open(self, fragment: int) -> None:
        entered = self._entered
        start = self._start(fragment)
        replica = Replica(
            *(self._store, entered.run, fragment),
            runtime=self._runtime,
            roster=entered.roster,
            site=entered.site,
            start=start,
        )
        at = "newest" if start is None else "held"
        logger.info("begins fragment=%d at=%s version=%d", fragment, at, replica.version)
        self._replicas[fragment] = replica

    def _start(self, fragment: int) -> Master | None:
        """What the process holds, where it is a master that no stored snapshot is newer than."""
        held, places = self._masters().get(fragment), (self._store, self._entered.run, self._entered.roster, fragment)
        if held is None:
            return None
        newest, _ = next(vouched_snapshots(*places), (0, ""))
        if held.version < newest or vouched_sha(*places, held.version) != held.sha256:
            return None
        return held

    def _make_courier(self) -> Courier:
        entered, runtime = self._entered, self._runtime
        return Courier(
            self._store,
            entered.run,
            runtime=runtime,
            roster=entered.roster,
            members=Members(self._store, runtime, entered.roster, entered.run.terms.liveness_s),
            pulse=entered.pulse,
            replicas=[self._replicas[one.index] for one in entered.run.fragments],
            tape=entered.tape,
            journal=self._journal,
            site=entered.site,
            incarnation=entered.incarnation,
        )


class Learner:
    """A joiner until its masters are whole: one task reads, one beats. Used by the training thread."""

    def __init__(
        self,
        entered: Entered,
        present: Present,
        *,
        runtime: Runtime,
        progress: Callable[[], tuple[int, int]],
        trained: Sequence[int] = (),
    ) -> None:
        """
        progress   this site's (inner step, trained tokens), for its beat
        trained    what a checkpoint of a learner holds of it
        """
        self._entered = entered
        self._present = present
        self._runtime = runtime
        self._progress = progress
        self._changed = runtime.condition()
        self._courier: Courier | None = None
        self._may_train = False
        self._is_training = False
        self._ended = False
        self._failure: BaseException | None = None
        self._denied_at: float | None = None
        self.trained = list(trained)
        """Tokens of each inner step so far."""
        self._reading = runtime.spawn("outer-learning", partial(self._guarded, self._read))
        self._beating = runtime.spawn("outer-joining", partial(self._guarded, self._beat))

    # --- what the training thread asks ------------------------------------------------------------------------------

    def is_read_soon(self) -> bool:
        """Wait until the masters are whole, READING_S at most where the process holds something of the run to train on.

        Raises what ended the reading, StoreError too: from now on a store that fails is asked again.
        """
        until = self._runtime.now() + READING_S
        with self._changed:
            while not self.is_whole():
                left = until - self._runtime.now()
                if self._may_train and left <= 0:
                    self._is_training = True
                    logger.info("learns site=%s", self._entered.site)
                    return False
                self._changed.wait(timeout=max(left, FOLLOW_S))
        return True

    def is_whole(self) -> bool:
        """Whether the masters have come. Raises what ended the reading."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            return self._courier is not None

    def wait(self, goes_on: Callable[[], bool]) -> None:
        """Wait until the masters are whole, or `goes_on` says no. Raises what ended the reading."""
        with self._changed:
            while not self.is_whole() and goes_on():
                self._changed.wait(timeout=FOLLOW_S)

    def train(self, tokens: int) -> int:
        """One inner step on `tokens` tokens; how many there were."""
        self.trained.append(tokens)
        return len(self.trained)

    def take(self) -> Courier:
        """The courier, whose passes nobody makes now; the learner is done. Raises what went wrong meanwhile."""
        self.stop()
        if self._failure is not None:
            raise self._failure
        assert self._courier is not None
        return self._courier

    def leave(self) -> None:
        """Let go of what was pinned; what is being read is left to end by itself."""
        self._end(self._beating)
        nothing = (0,) * len(self._entered.run.fragments)
        try:
            self._entered.pulse.beat("leaving", nothing, nothing, *self._progress())
            self._entered.tape.flush()
        except (StoreError, StoreUnusable) as error:
            logger.warning("beat_failed error=%s", error)

    def stop(self) -> None:
        """End both tasks."""
        self._end(self._reading, self._beating)

    def _end(self, *tasks: Task) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for task in tasks:
            if task.is_alive():
                task.join(timeout=CLOSE_S)

    # --- beside it --------------------------------------------------------------------------------------------------

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        until = self._runtime.now() + seconds
        with self._changed:
            while not self._ended and (left := until - self._runtime.now()) > 0:
                self._changed.wait(timeout=left)

    def _read(self) -> None:
        """Come to the present, and stay there until the training thread takes over."""
        may_train = self._present.holds_run()
        with self._changed:
            self._may_train = may_train
            self._changed.notify_all()
        while not self._ended:
            try:
                courier = self._present.read()
            except (StoreError, StoreUnusable) as error:
                self._bear(error)
                self._pause(RETRY_S)
                continue
            self._denied_at = None
            with self._changed:
                if self._courier is None:
                    self._courier = courier
                    self._changed.notify_all()
            self._pause(FOLLOW_S)

    def _bear(self, error: StoreError | StoreUnusable) -> None:
        """Raise an error of the store unless training goes on meanwhile; that it is no store for us, once it lasts."""
        now = self._runtime.now()
        self._denied_at = (self._denied_at or now) if isinstance(error, StoreUnusable) else None
        is_lasting = self._denied_at is not None and now - self._denied_at >= DENIED_S
        if is_lasting or not (self._is_training or self._courier is not None):
            raise error
        logger.warning("store_failed retry_in_s=%.1f error=%s", RETRY_S, error)

    def _beat(self) -> None:
        """Beat as long as it takes: over a slow link it outlasts `liveness_s`, after which nobody honours pins."""
        every_s = self._entered.run.terms.liveness_s / BEATS_PER_LIVENESS
        self._pause(every_s)
        while not self._ended:
            try:
                self._entered.beat_joining(*self._progress())
            except (StoreError, StoreUnusable) as error:
                logger.warning("beat_failed error=%s", error)
            self._pause(every_s)
