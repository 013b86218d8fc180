"""A stored master in two halves: the upper two bytes of every value, enough to train from, and the lower two.

Once trained, the lower half is noise that nothing makes shorter, 2 bytes a parameter; the upper one, which holds sign,
exponent and 7 bits of the mantissa as bf16 does, takes 1.35. Both lie in one object, so either can be fetched alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.chunks import empty
from composer_prime.outer.master_header import BLOCK, VALUE_BYTES, num_blocks, num_vectors
from composer_prime.outer.planes import fill_planes

UPPER, LOWER = range(2, 4), range(0, 2)
"""The bytes of a value, from the lowest."""
MIDDLE = 0x8000
"""The lower half of a value of which it isn't known: half-way, so that the guesses are right on the mean."""

Fetch = Callable[[int, int], bytes]
"""(start, length) -> so many bytes of the stored master from there, or fewer at its end."""
STRETCHES_AT_ONCE = 8
"""That are fetched side by side: so many megabytes are held, too."""


@dataclass(frozen=True)
class Stretch:
    """The planes of one half of one block, which lie side by side.

    vector, block   where they belong
    ends            where the first one begins and each one ends, in bytes of the stored master
    """

    vector: int
    block: int
    ends: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Their length."""
        return self.ends[-1] - self.ends[0]


def stretches(ends: Sequence[int], numel: int, *, momentum: bool, half: range) -> Iterator[Stretch]:
    """Where a half of a master of `numel` parameters lies; `ends` as `masters.plane_ends` gives them."""
    blocks = num_blocks(numel)
    for number in range(num_vectors(momentum=momentum) * blocks):
        first = VALUE_BYTES * number
        yield Stretch(*divmod(number, blocks), tuple(ends[first + half.start : first + half.stop + 1]))


def half_nbytes(ends: Sequence[int], numel: int, *, momentum: bool, half: range) -> int:
    """Bytes of a half."""
    return sum(stretch.nbytes for stretch in stretches(ends, numel, momentum=momentum, half=half))


AtOnce = Callable[[Callable[[Stretch], bytes], Sequence[Stretch]], list[bytes]]
"""What `function` gives for each of some stretches, in order."""


def upper_half(
    fetch: Fetch,
    ends: Sequence[int],
    numel: int,
    *,
    momentum: bool,
    at_once: AtOnce = lambda function, places: list(map(function, places)),
) -> list[Tensor]:
    """The vectors of a master as its upper half gives them: fp32 [numel] each, new memory, off by 2**-8 at most.

    at_once   calls `fetch` for several stretches side by side

    Raises CorruptObject when bytes are missing or no such planes.
    """
    vectors = [empty(numel) for _ in range(num_vectors(momentum=momentum))]
    for vector in vectors:
        vector.view(torch.int32).fill_(MIDDLE)
    places = list(stretches(ends, numel, momentum=momentum, half=UPPER))
    for first in range(0, len(places), STRETCHES_AT_ONCE):
        some = places[first : first + STRETCHES_AT_ONCE]
        for stretch, data in zip(some, at_once(lambda each: fetch(each.ends[0], each.nbytes), some), strict=True):
            _fill(vectors, stretch, data, UPPER)
    return vectors


def lower_half(
    fetch: Fetch,
    ends: Sequence[int],
    upper: Sequence[Tensor],
    *,
    goes_on: Callable[[], bool] = lambda: True,
) -> list[Tensor] | None:
    """The vectors of a master from its lower half and what `upper_half` gave: fp32 [numel] each, new memory, exact.

    goes_on   asked before each fetch; once it says no, the answer is None

    Raises CorruptObject when bytes are missing or no such planes.
    """
    vectors = [vector.clone() for vector in upper]
    for stretch in stretches(ends, upper[0].numel(), momentum=len(upper) > 1, half=LOWER):
        if not goes_on():
            return None
        _fill(vectors, stretch, fetch(stretch.ends[0], stretch.nbytes), LOWER)
    return vectors


def _fill(vectors: Sequence[Tensor], stretch: Stretch, fetched: bytes, half: range) -> None:
    start, data = stretch.ends[0], memoryview(fetched)
    if len(data) != stretch.nbytes:
        raise CorruptObject(f"a stored master has {len(data)} of {stretch.nbytes} bytes from {start}: fetch it again")
    pieces = (data[first - start : last - start] for first, last in pairwise(stretch.ends))
    fill_planes(vectors[stretch.vector][stretch.block * BLOCK : (stretch.block + 1) * BLOCK], pieces, half)
