"""A fragment's movement as payload bytes, slice by slice, and back; every slice is checked before it is decoded.

A payload is its slices' codes one after another. Slices have hashes and norms of their own, so that one site can merge
some slices of many offers without reading the rest.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime.errors import CorruptObject, PayloadUnsound
from composer_prime.outer.chunks import RESERVE, empty
from composer_prime.outer.codecs import Codec, is_sparse
from composer_prime.outer.slices import SlicePlan, root_sha256, slice_digest
from composer_prime.outer.sparse import Sparse, Vector, dense

NORM_TOLERANCE = 1e-4
"""Relative difference between a declared norm and the real one that rounding explains."""
UNSURE = 1e-9
"""Share of a norm within which sums of its squares in other orders differ, amply: those of 2^40 values in blocks do by
less than 1e-9. Nearer to the bound than that the squares are summed exactly, which takes some hundred times as long."""
NORM_ELEMENTS = 64 * 2**10
"""Values squared at a time: they stay in a core's cache, which is 7 times as fast as torch's own fp64 norm of fp32."""


@dataclass(frozen=True)
class Coded:
    """A coded fragment.

    data      the payload
    digests   hash of each slice's bytes
    norms     L2 norm of each slice as it decodes, 5 significant digits
    decoded   what every reader will decode; x itself when the codec loses nothing
    """

    data: bytes | memoryview
    digests: tuple[bytes, ...]
    norms: tuple[float, ...]
    decoded: Vector

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return len(self.data)

    @property
    def sha256(self) -> str:
        """The hash that names the payload."""
        return root_sha256(self.digests)

    def residual_of(self, movement: Tensor) -> Tensor:
        """What coding took from `movement`, which was coded: movement - decoded, in its memory."""
        if isinstance(self.decoded, Sparse):
            self.decoded.subtract_from(movement)
            return movement
        return movement.sub_(self.decoded)


def plan_slices(numel: int, num_slices: int, codecs: Sequence[Codec]) -> SlicePlan:
    """The slices of a fragment whose payloads and parts are coded by `codecs`; one where a codec can't be cut."""
    if not all(codec.sliceable for codec in codecs):
        return SlicePlan.of(numel, 1, 1)
    return SlicePlan.of(numel, num_slices, max(codec.block for codec in codecs))


def code(codec: Codec, x: Tensor, plan: SlicePlan) -> Coded:
    """Code x, fp32 [plan.numel] contiguous on the CPU. Raises SiteError on a value that isn't finite."""
    if is_sparse(codec):
        piece = codec.encode(x)
        few = codec.decode_sparse(piece, plan.numel)
        return Coded(piece, (slice_digest(piece),), (norm_of(torch.from_numpy(few.values)),), few)
    decoded = empty(plan.numel) if codec.lossy else x
    nbytes = sum(codec.nbytes(plan.size(index)) for index in range(plan.num_slices))
    data, at, digests, norms = RESERVE.take(nbytes).data, 0, [], []
    for start, stop in zip(plan.bounds, plan.bounds[1:], strict=False):
        piece = codec.encode(x[start:stop])
        data[at : at + len(piece)] = piece
        at += len(piece)
        if codec.lossy:
            decoded[start:stop] = codec.decode(piece, stop - start)
        digests.append(slice_digest(piece))
        norms.append(norm_of(decoded[start:stop]))
    return Coded(data.toreadonly(), tuple(digests), tuple(norms), decoded)


def decode_whole(
    codec: Codec, data: bytes | memoryview, digests: Sequence[bytes], norms: Sequence[float], plan: SlicePlan
) -> Vector:
    """All that a payload holds. As `decode` otherwise."""
    if not is_sparse(codec):
        return decode(codec, data, digests, norms, plan, 0, plan.num_slices)
    _check_digest(data, digests, 0)
    with _unsound(0):
        few = codec.decode_sparse(data, plan.numel)
    _check_norm(torch.from_numpy(few.values), norms, 0)
    return few


def decode(
    codec: Codec,
    data: bytes | memoryview,
    digests: Sequence[bytes],
    norms: Sequence[float],
    plan: SlicePlan,
    first: int,
    last: int,
) -> Tensor:
    """The elements of slices `first` to `last` - 1, fp32, from the bytes of those slices.

    digests, norms   of all slices, as the offer states them

    Raises CorruptObject when the bytes have another length or hash than declared; PayloadUnsound when they have that
    hash, and don't decode or have another norm, which is the same on every machine and at any time.
    """
    if is_sparse(codec):
        return dense(decode_whole(codec, data, digests, norms, plan))
    sizes = [codec.nbytes(plan.size(index)) for index in range(first, last)]
    if len(data) != sum(sizes):
        raise CorruptObject(
            f"{len(data)} bytes for slices {first} to {last}, which have {sum(sizes)}: refuse the offer"
        )
    values, view, at = empty(plan.bounds[last] - plan.bounds[first]), memoryview(data), 0
    for index, size in zip(range(first, last), sizes, strict=True):
        piece, at = view[at : at + size], at + size
        _check_digest(piece, digests, index)
        start = plan.bounds[index] - plan.bounds[first]
        span = values[start : start + plan.size(index)]
        with _unsound(index):
            span.copy_(codec.decode(piece, plan.size(index)))
        _check_norm(span, norms, index)
    return values


def _check_digest(piece: bytes | memoryview, digests: Sequence[bytes], index: int) -> None:
    if slice_digest(piece) != digests[index]:
        raise CorruptObject(f"slice {index} has another sha256 than its offer states: refuse the offer")


@contextmanager
def _unsound(index: int) -> Iterator[None]:
    """In it a slice is decoded whose hash is right."""
    try:
        yield
    except CorruptObject as error:
        raise PayloadUnsound(f"slice {index} doesn't decode: {error}") from error


def _check_norm(values: Tensor, norms: Sequence[float], index: int) -> None:
    """values: of the slice, zeros left out or not"""
    if not is_norm(norms[index], values):
        real = norm_of(values)
        raise PayloadUnsound(f"slice {index} has norm {real}, its offer states {norms[index]}: refuse the offer")


def is_norm(stated: float, x: Tensor) -> bool:
    """Whether `stated` may be the L2 norm of x, fp32: the same on every machine, in whatever order it adds."""
    root = math.sqrt(_squares(x))
    if abs(abs(root - stated) - (NORM_TOLERANCE * root + 1e-30)) <= UNSURE * root:
        root = math.sqrt(math.fsum(_each_square(x)))
    return abs(root - stated) <= NORM_TOLERANCE * root + 1e-30


def _each_square(x: Tensor) -> Iterator[float]:
    """Of fp32 values, so each is exact in fp64."""
    for start in range(0, x.numel(), NORM_ELEMENTS):
        yield from x[start : start + NORM_ELEMENTS].double().square().tolist()


def byte_range(codec: Codec, plan: SlicePlan, first: int, last: int) -> tuple[int, int]:
    """(offset, length) in a payload of slices `first` to `last` - 1, for a codec whose payloads can be cut."""
    before = sum(codec.nbytes(plan.size(index)) for index in range(first))
    return before, sum(codec.nbytes(plan.size(index)) for index in range(first, last))


def norm_of(x: Tensor) -> float:
    """L2 norm of x, summed in fp64, to 5 significant digits."""
    return float(f"{math.sqrt(_squares(x)):.5g}")


def _squares(x: Tensor) -> float:
    """The sum of x's squares in fp64; its last digits hang on the machine."""
    squares = 0.0
    for start in range(0, x.numel(), NORM_ELEMENTS):
        span = x[start : start + NORM_ELEMENTS].double()
        squares += float(torch.dot(span, span))
    return squares
