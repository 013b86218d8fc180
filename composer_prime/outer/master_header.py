"""The first bytes of a stored master say how long it is: a look at them is enough to know what it costs to fetch.

Free of torch and numpy, since whoever only counts bytes reads them too.
"""

import struct

from composer_prime.errors import CorruptObject

MAGIC = b"cpm\x01"
BLOCK = 2**20
"""Values that are coded together."""
VALUE_BYTES = 4
_HEADER = struct.Struct("<4sIQQ")
HEADER_BYTES = _HEADER.size
SIZE_BYTES = 4
"""Of an entry in the table of sizes that follows: one for every byte plane of every block."""


def num_vectors(*, momentum: bool) -> int:
    """Vectors in a master: weights, and momentum if it has any."""
    return 2 if momentum else 1


def num_blocks(numel: int) -> int:
    """Blocks of a vector; the last one may be short."""
    return -(-numel // BLOCK)


def table_bytes(numel: int, *, momentum: bool) -> int:
    """Length of the table of sizes."""
    return SIZE_BYTES * VALUE_BYTES * num_blocks(numel) * num_vectors(momentum=momentum)


def most_nbytes(numel: int, *, momentum: bool) -> int:
    """The most bytes that a stored master of `numel` parameters may have: nothing in it could be made smaller."""
    values = VALUE_BYTES * numel * num_vectors(momentum=momentum)
    return HEADER_BYTES + table_bytes(numel, momentum=momentum) + values


def write_header(numel: int, nbytes: int, *, momentum: bool) -> bytes:
    """The header of a stored master of `nbytes` in all."""
    return _HEADER.pack(MAGIC, num_vectors(momentum=momentum), numel, nbytes)


def read_header(head: bytes | bytearray | memoryview, numel: int, *, momentum: bool) -> int:
    """Bytes of the stored master that begins with `head`. Raises CorruptObject unless it can be one of `numel`."""
    wanted = f"a master of {numel} parameters {'with' if momentum else 'without'} momentum"
    if len(head) < HEADER_BYTES:
        raise CorruptObject(
            f"{wanted} begins with a header of {HEADER_BYTES} bytes, this one has {len(head)}: "
            "fetch it again, or rebuild it from the log"
        )
    magic, vectors, length, nbytes = _HEADER.unpack(head[:HEADER_BYTES])
    if (magic, vectors, length) != (MAGIC, num_vectors(momentum=momentum), numel):
        raise CorruptObject(
            f"{wanted} was expected, this one's header says {length} parameters in {vectors} vectors, marked {magic!r} "
            f"(should be {MAGIC!r}): rebuild it from the log"
        )
    most = most_nbytes(numel, momentum=momentum)
    if not HEADER_BYTES + table_bytes(numel, momentum=momentum) <= nbytes <= most:
        raise CorruptObject(f"{wanted} has at most {most} bytes, its header says {nbytes}: rebuild it from the log")
    return nbytes
