"""Our loss as a trainer imports it, with a clock around each call of the hook in a step.

The first rank writes the file that HOOK_COST names when it ends: a list of [step's seconds, the hook's own of them].
"""

import atexit
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_prime.sites.prime_rl.outer.steps import Trainer  # wraps the trainer's names, which call what follows


class Clock:
    """Seconds of each step, from one turn of the outer loop to the next, and those spent in the hook."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self._own_s = 0.0
        self._last: float | None = None

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, its seconds added up."""

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._own_s += time.perf_counter() - started

        return timed

    def ending_a_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, whose return ends a step."""
        timed = self.around(method)

        @functools.wraps(method)
        def last(*args: Any, **kwargs: Any) -> Any:
            made = timed(*args, **kwargs)
            now = time.perf_counter()
            if self._last is not None:
                self.steps.append((now - self._last, self._own_s))
            self._last, self._own_s = now, 0.0
            return made

        return last

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self.steps))


clock = Clock()
Trainer._count = clock.around(Trainer._count)
Trainer._after_step = clock.ending_a_step(Trainer._after_step)
if os.environ.get("RANK", "0") == "0":
    atexit.register(clock.write, Path(os.environ["HOOK_COST"]))

from composer_prime.sites.prime_rl.loss import composer_loss  # noqa: E402

__all__ = ["composer_loss"]
