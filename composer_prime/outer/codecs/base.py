"""What every codec keeps to: a flat fp32 vector to bytes and back, deterministic in every bit.

Bytes come from other machines, so `decode` checks all it is given before a value reaches a master; `encode` refuses
what no decoder would accept. tests/contracts/test_codec_contract.py holds every registered codec to this.
"""

from abc import ABC, abstractmethod
from typing import Protocol, TypeGuard

from torch import Tensor

from composer_prime.errors import CorruptObject, SiteError
from composer_prime.outer.chunks import first_nonfinite
from composer_prime.outer.sparse import Sparse

SLICE = 4096
"""Slices that are cut at multiples of this many elements may be coded apart by every codec that is `sliceable`."""


class Codec(Protocol):
    """One way to code a pseudo-gradient. Stateless, thread-safe, the same bits for any number of threads."""

    name: str

    lossy: bool
    """Whether decode(encode(x)) can differ from x, so that error feedback has something to keep."""

    sliceable: bool
    """Whether slices cut at multiples of `SLICE` may be coded apart: they decode to the same values as the whole, and
    their sizes are fixed."""

    block: int
    """Elements that are coded together. A sliceable codec may be cut at any multiple of it."""

    def encode(self, x: Tensor) -> bytes:
        """Code x, fp32 [n] contiguous on the CPU, as a payload within `size_bounds(n)`. x is not changed.

        Raises SiteError naming the first index whose value isn't finite, or is beyond what the code can hold.
        """
        ...

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """fp32 [numel] in new memory, all finite; of what `encode` wrote, the result codes to the same values again.

        Raises CorruptObject when the size of `data` isn't within `size_bounds(numel)`, before anything else is done,
        or when `data` can't be what `encode` writes. Memory is at most proportional to numel, whatever the bytes say.
        """
        ...

    def size_bounds(self, numel: int) -> tuple[int, int]:
        """The least and the most bytes that a sound payload of `numel` elements has; equal when the size is fixed."""
        ...

    def nbytes(self, numel: int) -> int:
        """The typical size in bytes, for plans; only `size_bounds` may decide what is refused.

        Exact when the size is fixed; otherwise the expected size for values whose order tells nothing, rounded up.
        """
        ...


class SparseCodec(Codec, Protocol):
    """A codec whose payloads decode to few values and many zeros."""

    def decode_sparse(self, data: bytes | bytearray | memoryview, numel: int) -> Sparse:
        """As `decode`, but the zeros aren't written."""
        ...


def is_sparse(codec: Codec) -> TypeGuard[SparseCodec]:
    """Whether this codec's payloads decode to few values. Asked for each payload: isinstance takes 50 times as long."""
    return hasattr(codec, "decode_sparse")


class FixedSize(ABC):
    """Size bounds of a codec whose payloads of one length all have the same size, `nbytes`."""

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """See `Codec.nbytes`: exact."""

    def size_bounds(self, numel: int) -> tuple[int, int]:
        """See `Codec.size_bounds`: both are `nbytes(numel)`."""
        size = self.nbytes(numel)
        return size, size


def check_size(codec: Codec, data: bytes | bytearray | memoryview, numel: int) -> None:
    """Raise CorruptObject when `data` isn't as long as `numel` elements can be in this codec."""
    least, most = codec.size_bounds(numel)
    if not least <= len(data) <= most:
        sizes = f"{least}" if least == most else f"{least} to {most}"
        raise CorruptObject(
            f"{numel} values in {codec.name} are {sizes} bytes, this payload has {len(data)}: "
            "refuse the offer that names it"
        )


def check_encodable(codec: Codec, x: Tensor, coded: Tensor, start: int = 0) -> None:
    """Raise SiteError when `coded`, the code's image of x (which begins at index `start`), isn't finite everywhere."""
    bad = first_nonfinite(coded)
    if bad is not None:
        raise SiteError(
            f"value {start + bad} of the pseudo-gradient is {float(x[bad])}, {codec.name} needs finite values in its "
            "range: the local weights have diverged; lower trainer.optim.lr or resume from an earlier checkpoint"
        )


def check_decoded(codec: Codec, x: Tensor) -> None:
    """Raise CorruptObject when a decoded vector isn't finite everywhere."""
    bad = first_nonfinite(x)
    if bad is not None:
        raise CorruptObject(
            f"value {bad} of a {codec.name} payload is {float(x[bad])}, all must be finite: "
            "refuse the offer that names it"
        )
