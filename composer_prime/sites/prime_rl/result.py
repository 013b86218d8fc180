"""The record that a trainer leaves when its outer run has ended, and how the launcher beside it notices.

PRIME-RL's orchestrator waits for the trainer's `max_steps`; only the launcher can end what waits for nothing. No torch.
"""

import json
from pathlib import Path

FOLDER = "outer"
"""What the outer loop keeps in a trainer's folder."""
RESULT = "result.json"
"""In `FOLDER`: written whole, and last of all that a trainer does for its run."""
WAITING = "waiting.json"
"""In `FOLDER`: what the trainer waits for, or last did, where it was long (waiting.py)."""
STEPS_LEFT = "steps_left"
"""In the record: whether the trainer makes further steps, which change nothing."""


class RunEnd:
    """Whether a trainer that was started after this was made has come to its run's end with steps left."""

    def __init__(self, trainer_folder: Path) -> None:
        self._file = trainer_folder / FOLDER / RESULT
        self._earlier = self._stamp()
        self.waiting = trainer_folder / FOLDER / WAITING
        self.waiting.unlink(missing_ok=True)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def has_come(self) -> bool:
        """What an earlier trainer left in the folder doesn't count."""
        stamp = self._stamp()
        if stamp is None or stamp == self._earlier:
            return False
        return json.loads(self._file.read_text(encoding="utf-8"))[STEPS_LEFT]
