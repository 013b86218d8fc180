"""The clock that PRIME-RL's trainer measures itself by, which stands still during the outer loop's turn.

Upstream's `time/forward_backward` ends after `scheduler.step`, where our turn is; throughput and MFU follow from it.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from composer_prime.metrics import OUTER_TURN_S

logger = logging.getLogger(__name__)


class TrainerClock:
    """Python's `time` as the trainer's module sees it, and it alone: its `perf_counter` leaves our turns out."""

    def __init__(self) -> None:
        self.stood_s = 0.0
        """Seconds of all turns so far."""

    @classmethod
    def put_into(cls, names: dict[str, Any]) -> "TrainerClock":
        """Take the place of `time` among a module's names; a warning says what follows where it isn't there."""
        clock = cls()
        if names.get("time") is time:
            names["time"] = clock
        else:
            logger.warning(
                "this PRIME-RL's trainer doesn't measure by time.perf_counter: its time/forward_backward, throughput "
                "and MFU hold the outer loop's turns, which are %s",
                OUTER_TURN_S,
            )
        return clock

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def perf_counter(self) -> float:
        """Seconds, never less than before; as fast as the real one outside our turns."""
        return time.perf_counter() - self.stood_s

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Stand still for a turn. On the training thread, which alone asks."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stood_s += time.perf_counter() - started
