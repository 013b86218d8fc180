"""How many are inside of something at once: the bound is reached, and no one comes in beyond it."""

import threading

from tests.patience import PATIENCE_S

MOMENT_S = 0.1


class Crowd:
    """Holds its visitors until `num` are inside and a moment more, in which one too many would come in and be seen."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._changed = threading.Condition()
        self._inside = 0
        self.most = 0
        """How many were inside at once, at most."""

    def visit(self) -> None:
        """Come in, wait, and leave."""
        with self._changed:
            self._inside += 1
            self.most = max(self.most, self._inside)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._num, PATIENCE_S)
            self._changed.wait_for(lambda: self.most > self._num, MOMENT_S)
            self._inside -= 1
