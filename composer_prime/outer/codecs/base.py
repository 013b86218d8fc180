"""What every codec keeps to: a flat fp32 vector to bytes and back, deterministic in every bit.

Bytes come from other machines, so `decode` checks all it is given before a value reaches a master; `encode` refuses
what no decoder would accept. tests/contracts/test_codec_contract.py holds every registered codec to this.
"""

from typing import Protocol

from torch import Tensor

from composer_prime.errors import CorruptObject, SiteError
from composer_prime.outer.chunks import first_nonfinite


class Codec(Protocol):
    """One way to code a pseudo-gradient. Stateless, thread-safe, the same bits for any number of threads."""

    name: str

    def encode(self, x: Tensor) -> bytes:
        """Code x, fp32 [n] contiguous on the CPU, as `nbytes(n)` bytes. x is not changed.

        Raises SiteError naming the first index whose value isn't finite, or is beyond what the code can hold.
        """
        ...

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> Tensor:
        """fp32 [numel] in new memory; coding the result again gives it back unchanged.

        Raises CorruptObject when `data` isn't `nbytes(numel)` bytes or is nothing that `encode` writes.
        """
        ...

    def nbytes(self, numel: int) -> int:
        """Exact size in bytes of a coded vector of `numel` elements."""
        ...


def check_size(codec: Codec, data: bytes | bytearray | memoryview, numel: int) -> None:
    """Raise CorruptObject when `data` isn't as long as `numel` elements are in this codec."""
    if len(data) != codec.nbytes(numel):
        raise CorruptObject(
            f"{numel} values in {codec.name} are {codec.nbytes(numel)} bytes, this payload has {len(data)}: "
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
