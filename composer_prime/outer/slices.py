"""Where a fragment's payload may be cut: slices that are coded and hashed on their own, and parts made of slices.

The cut follows from the fragment's size and the run's terms alone, so every site makes the same one. No torch here.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_BYTES = 20
"""Kept of a slice's sha256: two slices of one hash cost 2**80 tries, and offers stay small."""


@dataclass(frozen=True)
class SlicePlan:
    """Slice i holds the elements from `bounds[i]` to `bounds[i + 1]`; the first bound is 0, the last the numel."""

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, numel: int, num_slices: int, align: int) -> "SlicePlan":
        """At most `num_slices` slices of one length, but the last, which is a multiple of `align` elements."""
        length = math.ceil(math.ceil(numel / num_slices) / align) * align
        return cls((*range(0, numel, max(length, 1)), numel) if numel else (0, 0))

    @property
    def numel(self) -> int:
        """Elements of the fragment."""
        return self.bounds[-1]

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return len(self.bounds) - 1

    def size(self, index: int) -> int:
        """Elements of one slice."""
        return self.bounds[index + 1] - self.bounds[index]

    def part(self, index: int, num_parts: int) -> tuple[int, int]:
        """(first, last + 1) of the slices that make part `index` of `num_parts`; sizes differ by one slice at most."""
        return index * self.num_slices // num_parts, (index + 1) * self.num_slices // num_parts


def slice_digest(piece: bytes | memoryview) -> bytes:
    """The hash of one slice's bytes."""
    return hashlib.sha256(piece).digest()[:DIGEST_BYTES]


def root_sha256(digests: Sequence[bytes]) -> str:
    """The hash (hex) that names a payload: sha256 over its slices' hashes, so the bytes are read once for both."""
    return hashlib.sha256(b"".join(digests)).hexdigest()
