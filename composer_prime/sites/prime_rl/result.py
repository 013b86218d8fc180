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
    """Whether a trainer that is started after this was made has come to its run's end with steps left.

    What an earlier trainer left in the folder is deleted.
    """

    def __init__(self, trainer_folder: Path) -> None:
        self._result = trainer_folder / FOLDER / RESULT
        self.waiting = trainer_folder / FOLDER / WAITING
        for left in (self._result, self.waiting):
            left.unlink(missing_ok=True)

    def has_come(self) -> bool:
        """Whether it has by now."""
        return self._result.exists() and json.loads(self._result.read_text(encoding="utf-8"))[STEPS_LEFT]
