"""Rule 7: every token has one fate. Counts what this site trained, per fragment, and where it went.

    trained = merged + dropped + carried;  carried = pending (since the last capture) + captured (in an offer still out)

All counts are in trained tokens. The movement itself lives in the parameters; this is its book.
"""

from dataclasses import dataclass
from typing import Any


@dataclass
class FragmentLedger:
    """The fates of one fragment's tokens at this site. Mutated only through its methods."""

    trained: int = 0
    merged: int = 0
    dropped: int = 0
    captured: int = 0
    captured_steps: int = 0
    pending_steps: int = 0
    missed_rounds: int = 0

    @property
    def carried(self) -> int:
        """Tokens whose movement no commit has taken yet."""
        return self.trained - self.merged - self.dropped

    @property
    def pending(self) -> int:
        """Tokens trained since the last capture that is still out."""
        return self.carried - self.captured

    def train(self, tokens: int) -> None:
        """One inner step on `tokens` tokens."""
        self.trained += tokens
        self.pending_steps += 1

    def capture(self) -> tuple[int, int]:
        """All carried movement goes into an offer; returns its (tokens, steps)."""
        self.captured = self.carried
        self.captured_steps += self.pending_steps
        self.pending_steps = 0
        return self.captured, self.captured_steps

    def settle_taken(self) -> int:
        """A commit took the offer. Returns the tokens merged."""
        tokens = self.captured
        self.merged += tokens
        self._clear_capture()
        self.missed_rounds = 0
        return tokens

    def miss_round(self) -> None:
        """A round closed without the offer that was out; the work is carried."""
        self.missed_rounds += 1

    def release_capture(self) -> None:
        """The offer is out of the game: its movement is offered anew with what has come since."""
        self.pending_steps += self.captured_steps
        self._clear_capture()

    def drop(self) -> int:
        """The site restarts from the master. Returns the tokens dropped."""
        tokens = self.carried
        self.dropped += tokens
        self._clear_capture()
        self.pending_steps = 0
        self.missed_rounds = 0
        return tokens

    def restore(self, *, trained: int, merged: int, carried: int, steps: int) -> None:
        """Rule 12: continue from what the bucket knows, which is newer than the checkpoint.

        trained, carried, steps   as the newest own offer states them; carried is 0 when a commit took it
        merged                    all that commits ever took of this site; what is in neither was dropped
        """
        self.trained, self.merged, self.dropped = trained, merged, trained - merged - carried
        self.captured, self.captured_steps = carried, steps
        self.pending_steps = self.missed_rounds = 0

    def _clear_capture(self) -> None:
        self.captured = 0
        self.captured_steps = 0

    def to_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        return dict(vars(self))
