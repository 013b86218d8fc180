"""Ctrl-C as a flag that a loop looks at, so that nothing is cut off in the middle of starting a process.

A second one raises at once, wherever we are; `finally` blocks then end what runs.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Whether somebody wants us to stop."""

    def __init__(self) -> None:
        self.is_set = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler: the first asks, the second insists (KeyboardInterrupt)."""
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """SIGINT, SIGTERM and, unless nohup has it ignored, SIGHUP go to the flag while inside.

    Main thread only, as Python's signals are.
    """
    interrupt = Interrupt()
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, interrupt.handle) for number in _SIGNALS if number not in ignored}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
