"""How tests wait: for a condition, and so long that only what hangs is ended. No test asserts how fast something is."""

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""On two cores that eight others keep busy all takes ten times as long, and starting a process of torch's a minute."""
POLL_S = 0.02


def wait_until(holds: Callable[[], object], what: str = "it never came to be") -> None:
    """Return once `holds()`; fail with `what` when it hangs."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at, f"waited {PATIENCE_S:.0f} s for: {what}"
        time.sleep(POLL_S)
