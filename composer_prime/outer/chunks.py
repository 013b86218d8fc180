"""How long flat fp32 vectors are walked: in spans, so that temporaries stay small and near the core.

Walking changes no bit of any result, only speed and memory: on 33 M values whole tensors coded int8 at about half the
speed of spans, while spans of 64 Ki to 4 Mi elements didn't differ by more than the noise of a shared machine.

Their memory is given out again once nobody uses it, since a round needs what the one before it needed. Fresh memory
costs: on a virtual machine that hands freed pages back to its host, the first touches of 100 MB took up to 0.25 s of a
core, ten times the arithmetic that is done there.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK_ELEMENTS = 4 * 2**20
"""Elements in a span; a multiple of every codec's block."""


LARGE_BYTES = 4 * 2**20
"""Shorter memory comes and goes as it always does: the allocator keeps it itself."""
SLACK = 1 / 8
"""A buffer may be longer than asked for by this share: fragments differ a little in size."""


class Reserve:
    """Buffers that are lent and come back by themselves, when the last array or view over them is gone. Thread-safe.

    What lies idle and what is lent never add up to more than was lent at once before: a process grows no larger by it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._back: deque[np.ndarray] = deque()
        """What finalizers put here, in whatever thread and whenever they run: with the lock held, too."""
        self._idle: list[np.ndarray] = []  # longest idle first
        self._lent = self._most = 0
        self.fresh = 0
        """Bytes that were asked of the system."""

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], not initialised, writable. Its memory is this array's, and that of all views of it, alone."""
        if nbytes < LARGE_BYTES:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            self._collect()
            memory = self._fitting(nbytes)
            if memory is None:
                memory = np.empty(nbytes, np.uint8)
                self.fresh += nbytes
            self._lent += memory.nbytes
            self._most = max(self._most, self._lent)
            self._shrink()
        # Over a memoryview, not over the array: numpy lets a view of a view keep only the array that owns the memory.
        lent = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(lent, self._back.append, memory).atexit = False
        return lent

    def _collect(self) -> None:
        while self._back:
            memory = self._back.popleft()
            self._lent -= memory.nbytes
            self._idle.append(memory)

    def _fitting(self, nbytes: int) -> np.ndarray | None:
        """The shortest idle buffer that is long enough and not much longer, the one used last of several."""
        most = nbytes * (1 + SLACK)
        fitting = [index for index, memory in enumerate(self._idle) if nbytes <= memory.nbytes <= most]
        if not fitting:
            return None
        return self._idle.pop(min(reversed(fitting), key=lambda index: self._idle[index].nbytes))

    def _shrink(self) -> None:
        idle = sum(memory.nbytes for memory in self._idle)
        while self._idle and self._lent + idle > self._most:
            idle -= self._idle.pop(0).nbytes


RESERVE = Reserve()
"""The process's own."""


def spans(numel: int, length: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive spans of at most `length` (CHUNK_ELEMENTS) that cover `range(numel)`."""
    length = length or CHUNK_ELEMENTS
    for start in range(0, numel, length):
        yield start, min(start + length, numel)


def empty(numel: int) -> Tensor:
    """fp32 [numel] on the CPU, not initialised; where it is long, in memory that was used before (`Reserve`).

    From numpy, which asks the kernel for huge pages: for vectors of 100 MB and more, first touches of small pages cost
    more than the arithmetic.
    """
    return torch.from_numpy(RESERVE.take(4 * numel).view(np.float32))


def scratch(numel: int) -> Tensor:
    """fp32 [length of the longest span of `numel` elements] on the CPU, not initialised; reused from span to span."""
    return torch.empty(min(numel, CHUNK_ELEMENTS), dtype=torch.float32)


def first_nonfinite(x: Tensor) -> int | None:
    """Index of the first NaN or infinity of x, any float dtype, 1-D; None when all values are finite."""
    for start, stop in spans(x.numel()):
        least, greatest = torch.aminmax(x[start:stop])  # both NaN as soon as one value is
        if not (float(least) > -math.inf and float(greatest) < math.inf):
            return start + int(torch.nonzero(~torch.isfinite(x[start:stop]))[0])
    return None
