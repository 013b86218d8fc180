"""In which order a site meets its tasks: every source in turn, each in seeded shuffles without end.

Within one pass over a source no task comes twice; after it the source is shuffled anew.
"""

import random
from collections.abc import Sequence


class TaskOrder:
    """An endless sequence of (source, task) indices.

    sizes  number of tasks of every source, each at least 1.
    seed   the order is a pure function of it and of `sizes`.
    begin  how many of it were drawn before: it goes on after them.
    """

    def __init__(self, sizes: Sequence[int], seed: str, begin: int = 0) -> None:
        self._sizes = list(sizes)
        self._random = random.Random(seed)
        self._left: list[list[int]] = [[] for _ in sizes]
        self.num_drawn = 0
        self.draw(begin)

    def draw(self, count: int) -> list[tuple[int, int]]:
        """The next `count` pairs of a source's index and the index of one of its tasks."""
        return [self._next() for _ in range(count)]

    def _next(self) -> tuple[int, int]:
        source = self.num_drawn % len(self._sizes)
        self.num_drawn += 1
        if not self._left[source]:
            self._left[source] = self._random.sample(range(self._sizes[source]), self._sizes[source])
        return source, self._left[source].pop()
