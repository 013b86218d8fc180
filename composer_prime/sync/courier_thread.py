"""Drives a courier and a pulse on threads of their own, so that the training thread never does their work (rule 8).

What goes wrong there is kept and raised on the training thread at its next call; a store that fails for a while is not
wrong, it is tried again.
"""

import logging
import threading
import time
from collections.abc import Callable

from composer_prime.errors import StoreError
from composer_prime.sync.courier import Courier
from composer_prime.sync.members import Pulse
from composer_prime.sync.records import SiteState
from composer_prime.sync.tape import Tape

logger = logging.getLogger(__name__)

BUSY_POLL_S = 0.02
"""Seconds between passes right after something was handed over."""
IDLE_POLL_S = 0.5
"""Seconds between passes with nothing out; passes slow down towards it while a round stays open."""
RETRY_S = 1.0
"""Seconds after a failed pass before the next one."""


class CourierThread:
    """Two daemon threads: one makes the courier's passes, one beats. Start, use, `close`."""

    def __init__(
        self,
        courier: Courier,
        pulse: Pulse,
        tape: Tape,
        *,
        beat_every_s: float,
        progress: Callable[[], tuple[int, int]],
        poll_limit_s: float = IDLE_POLL_S / 2,
    ) -> None:
        """
        progress       this site's (inner step, trained tokens), for its beat
        poll_limit_s   slowest polling of an open round, seconds
        """
        self._courier = courier
        self._pulse = pulse
        self._tape = tape
        self._beat_every_s = beat_every_s
        self._progress = progress
        self._poll_limit_s = poll_limit_s
        self._state: SiteState = "joining"
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._passes,), name="outer-courier", daemon=True),
            threading.Thread(target=self._guarded, args=(self._beats,), name="outer-pulse", daemon=True),
        ]

    def start(self, state: SiteState) -> None:
        """Beat once, so that others see this site, then start both threads."""
        self.announce(state)
        for thread in self._threads:
            thread.start()

    def announce(self, state: SiteState) -> None:
        """Change the state others see, now; while the store fails, with the next beat that gets through."""
        self._state = state
        self._try_beat()

    def wake(self) -> None:
        """Something was handed to the courier: make a pass now."""
        self._wake.set()

    def check(self) -> None:
        """Raise on the caller's thread what stopped one of ours."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop both threads and flush the tape. Doesn't wait for rounds: the caller has."""
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=30)
        try:
            self._tape.flush()
        except StoreError as error:
            logger.warning("tape_not_flushed error=%s", error)

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            self._failure = error
            with self._courier.changed:
                self._courier.changed.notify_all()

    def _passes(self) -> None:
        poll_s = BUSY_POLL_S
        flushed_at = time.monotonic()
        while not self._stop.is_set():
            try:
                self._courier.tick()
                if time.monotonic() - flushed_at > self._beat_every_s:
                    self._tape.flush()
                    flushed_at = time.monotonic()
            except StoreError as error:
                logger.warning("store_failed retry_in_s=%.1f error=%s", RETRY_S, error)
                self._stop.wait(RETRY_S)
                continue
            poll_s = min(poll_s * 1.5, self._poll_limit_s) if self._courier.has_errands else IDLE_POLL_S
            if self._wake.wait(poll_s):
                self._wake.clear()
                poll_s = BUSY_POLL_S

    def _beats(self) -> None:
        while not self._stop.wait(self._beat_every_s):
            self._try_beat()

    def _try_beat(self) -> None:
        inner_step, trained_tokens = self._progress()
        try:
            self._pulse.beat(self._state, self._courier.versions(), inner_step, trained_tokens)
        except StoreError as error:
            logger.warning("beat_failed error=%s", error)
