"""Drives a courier and a pulse beside the training thread, so that it never does their work (rule 8).

What goes wrong there is kept and raised on the training thread at its next call; a store that fails for a while is not
wrong, it is tried again. That it is no store for us, or that our run is gone, is believed once it is said for long.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from composer_prime.errors import PayloadLost, RoundWaits, RunGone, RunReplaced, SiteRevoked, StoreError, StoreUnusable
from composer_prime.sync.courier import Courier
from composer_prime.sync.entering import BEATS_PER_LIVENESS
from composer_prime.sync.members import Pulse
from composer_prime.sync.records import SiteState
from composer_prime.sync.runtime import Runtime, Task
from composer_prime.sync.tape import Tape
from composer_prime.waiting import Waiting, Waits

logger = logging.getLogger(__name__)

BUSY_POLL_S = 0.02
"""Seconds between passes right after something was handed over, while the training thread waits for it."""
GATHERING_POLL_S = 0.1
"""While a round comes together: what comes next, offers and the commit, is worth seeing soon."""
OPEN_POLL_S = 0.25
"""Slowest polling of an open round: a look takes milliseconds of a core, which training may need more."""
POLL_SHARE = 0.05
"""Until then, the pause between two passes as a share of the time waited: so much longer a round takes at most."""
IDLE_POLL_S = 0.5
"""Seconds between passes with nothing out."""
RETRY_S = 1.0
"""Seconds after a failed pass before the next one."""
DENIED_PASSES, DENIED_S = 5, 60.0
"""A store that says in so many passes in a row, over so many seconds, that it can't be used or that the run is gone
ends the site. One such answer may be a proxy's, or a server's that has just started. So does a payload that nobody has,
once its site, were it there, would have put it again: after the liveness time, if that is longer."""
CLOSE_S = 30.0
"""How long closing waits for a pass that is under way."""


class Driver:
    """Two tasks: one makes the courier's passes, one beats. Start, `close`."""

    def __init__(
        self,
        courier: Courier,
        pulse: Pulse,
        tape: Tape,
        *,
        runtime: Runtime,
        beat_every_s: float,
        progress: Callable[[], tuple[int, int]],
        waits: Waits | None = None,
    ) -> None:
        """progress: this site's (inner step, trained tokens), for its beat"""
        self._courier = courier
        self._pulse = pulse
        self._tape = tape
        self._runtime = runtime
        self._beat_every_s = beat_every_s
        self._progress = progress
        self._waits = waits or Waits(clock=runtime.now, wall=runtime.now)
        self._waits.listener = self._note_wait
        self._state: SiteState = "joining"
        self._beating = runtime.lock()
        """Held for one beat: the last one that is written says the last state."""
        self._signal = runtime.condition()
        self._awake = False
        self._stop = False
        self._failure: BaseException | None = None
        self._denied_at: list[float] = []
        """When the last passes, one after another, were told that the store can't be used or that the run is gone."""
        self._tasks: list[Task] = []
        self.awaited = False
        """Whether the training thread waits for a round, so that every moment counts."""
        courier.uploads.on_ready = self.wake

    def start(self, state: SiteState) -> None:
        """Beat once, so that others see this site, then start both tasks."""
        self.announce(state)
        loops = {"outer-courier": self._passes, "outer-pulse": self._beats}
        for name, loop in loops.items():
            self._tasks.append(self._runtime.spawn(name, partial(self._guarded, loop)))

    def announce(self, state: SiteState) -> None:
        """Change the state others see, now; while the store fails, with the next beat that gets through."""
        self._state = state
        self._try_beat()

    def wake(self) -> None:
        """Something was handed to the courier: make a pass now."""
        with self._signal:
            self._awake = True
            self._signal.notify_all()

    def check(self) -> None:
        """Raise on the caller's thread what stopped one of ours."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop both tasks and flush the tape. Doesn't wait for rounds: the caller has."""
        with self._signal:
            self._stop = True
            self._signal.notify_all()
        with self._courier.changed:
            self._courier.changed.notify_all()
        for task in self._tasks:
            if task.is_alive():
                task.join(timeout=CLOSE_S)
        if isinstance(self._failure, RunReplaced):
            return  # the other run's tapes are its own
        try:
            self._tape.flush()
        except (StoreError, StoreUnusable, SiteRevoked) as error:
            logger.warning("tape_not_flushed error=%s", error)

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            self._failure = error
            with self._courier.changed:
                self._courier.changed.notify_all()

    def _pause(self, seconds: float) -> bool:
        """Wait, at most so long; whether somebody woke us."""
        with self._signal:
            if not self._stop and not self._awake:
                self._signal.wait(timeout=seconds)
            woken, self._awake = self._awake, False
            return woken

    def _rest(self) -> None:
        """Wait RETRY_S after a failure, whoever wakes us: an upload that fails at once would have us try at once."""
        until = self._runtime.now() + RETRY_S
        with self._signal:
            while not self._stop and (left := until - self._runtime.now()) > 0:
                self._signal.wait(timeout=left)

    def _note_wait(self, waiting: Waiting) -> None:
        logger.warning("waits %s", waiting)
        self._tape.write("waits", **asdict(waiting))

    def _passes(self) -> None:
        moved_at = self._runtime.now()
        versions = self._courier.versions()
        while not self._stop:
            began = self._runtime.now()
            try:
                self._courier.tick()
                self._denied_at.clear()
            except (StoreError, StoreUnusable, RunGone) as error:
                if isinstance(error, StoreError) and not isinstance(error, RoundWaits):
                    self._denied_at.clear()
                else:
                    self._bear(error)
                logger.warning("store_failed retry_in_s=%.1f error=%s", RETRY_S, error)
                self._waits.say("store", str(error), since=began)
                self._rest()
                continue
            self._waits.say("store", None)
            if self._courier.versions() != versions:
                versions, moved_at = self._courier.versions(), self._runtime.now()
            if self._pause(self._patience_s(self._runtime.now() - moved_at)):
                moved_at = self._runtime.now()

    def _bear(self, error: StoreUnusable | RunGone | RoundWaits) -> None:
        """Raise an error that would end the site once it has lasted; the first of a row goes on the tape."""
        if isinstance(error, RunReplaced):
            raise error
        now, patience_s = self._runtime.now(), DENIED_S
        if not self._denied_at:
            self._tape.write("denied", error=type(error).__name__)
        if isinstance(error, RoundWaits):
            patience_s = max(DENIED_S, self._beat_every_s * BEATS_PER_LIVENESS)
        self._denied_at.append(now)
        lasted_s = now - self._denied_at[0]
        if len(self._denied_at) >= DENIED_PASSES and lasted_s >= patience_s:
            if isinstance(error, RoundWaits):
                raise PayloadLost(f"{error} (missed for {lasted_s:.0f} s), then start this site with --resume")
            raise error

    def _patience_s(self, waited_s: float) -> float:
        """The pause until the next pass, when nothing has moved for `waited_s`."""
        if not self._courier.has_errands:
            return IDLE_POLL_S
        if self._courier.is_uploading or not (self.awaited or self._courier.is_gathering):
            return OPEN_POLL_S  # the end of an upload wakes us
        return min(max(POLL_SHARE * waited_s, BUSY_POLL_S if self.awaited else GATHERING_POLL_S), OPEN_POLL_S)

    def _beats(self) -> None:
        due = self._runtime.now() + self._beat_every_s
        while not self._stop:
            with self._signal:
                left = due - self._runtime.now()
                if left > 0:
                    self._signal.wait(timeout=left)
                    continue
            self._try_beat()
            due = self._runtime.now() + self._beat_every_s

    def _try_beat(self) -> None:
        if isinstance(self._failure, RunReplaced):
            return
        inner_step, trained_tokens = self._progress()
        courier = self._courier
        try:
            with self._beating:
                self._pulse.beat(self._state, courier.versions(), courier.pins(), inner_step, trained_tokens)
            self._tape.flush()
        except (StoreError, StoreUnusable, SiteRevoked) as error:
            # That we aren't let in any more, the courier says, too.
            logger.warning("beat_failed error=%s", error)
