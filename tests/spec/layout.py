"""What goes where: parameters into fragments, fragments into slices, slices into parts, masters into bytes."""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from tests.spec.codecs import BLOCKS, MERGED

Vector = npt.NDArray[np.float32]

_MASTER_BLOCK = 2**20


class BadMaster(Exception):
    """These bytes are no master of the fragment's size."""


def blocks_of(parameters: list[dict[str, Any]]) -> list[list[tuple[str, list[int]]]]:
    """Names and shapes by block, in the order of blocks, of the manifest's list, which is in the model's order."""
    named = [(each["name"], each["shape"]) for each in parameters]
    numbered = any(number_of(name) is not None for name, _ in named)
    found: dict[tuple[int, int | str], list[tuple[str, list[int]]]] = {}
    seen_number = False
    for name, shape in named:
        number = number_of(name)
        seen_number |= number is not None
        if not numbered:
            place: tuple[int, int | str] = (0, name.split(".")[0])
        elif number is not None:
            place = (1, number)
        else:
            place = (2, 0) if seen_number else (0, 0)
        found.setdefault(place, []).append((name, shape))
    order = sorted(found) if numbered else list(found)
    return [sorted(found[place]) for place in order]


def number_of(name: str) -> int | None:
    return next((int(piece) for piece in name.split(".") if piece.isascii() and piece.isdigit()), None)


def fingerprint(blocks: list[list[tuple[str, list[int]]]]) -> str:
    return hashlib.sha256(json.dumps(blocks, separators=(",", ":")).encode()).hexdigest()


def fragment_sizes(blocks: list[list[tuple[str, list[int]]]], num_fragments: int) -> list[int]:
    sizes = [0] * num_fragments
    for index, block in enumerate(blocks):
        sizes[index % num_fragments] += sum(math.prod(shape) for _, shape in block)
    return sizes


@dataclass(frozen=True)
class Slices:
    """How one fragment is cut: `bounds[i]` is where slice i begins, `bounds[i + 1]` where it ends."""

    bounds: list[int]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def sizes(self) -> list[int]:
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]

    def part(self, index: int, num_parts: int) -> range:
        """The slices of part `index` of `num_parts`."""
        return range(index * len(self) // num_parts, (index + 1) * len(self) // num_parts)


def cut(size: int, terms: dict[str, Any]) -> Slices:
    if terms["codec"] == "topk":
        return Slices([0, size])
    block = max(BLOCKS[terms["codec"]], BLOCKS[MERGED])
    length = math.ceil(math.ceil(size / terms["slices"]) / block) * block
    return Slices([*range(0, size, length), size])


def decode_master(data: bytes, size: int, num_vectors: int) -> list[Vector]:
    """The vectors of `size` values in a stored master; BadMaster where a byte isn't as the document says."""
    pieces = [min(_MASTER_BLOCK, size - at) for at in range(0, size, _MASTER_BLOCK) for _ in range(4)] * num_vectors
    head = 24 + 4 * len(pieces)
    if len(data) < head or data[:24] != struct.pack("<4sIQQ", b"cpm\x01", num_vectors, size, len(data)):
        raise BadMaster("another header than that of the fragment")
    stored = struct.unpack(f"<{len(pieces)}I", data[24:head])
    if head + sum(stored) != len(data) or any(have > length for have, length in zip(stored, pieces, strict=True)):
        raise BadMaster("another table than that of the fragment")
    planes, at = [], head
    for have, length in zip(stored, pieces, strict=True):
        planes.append(_plane(data[at : at + have], length))
        at += have
    blocks = [np.stack(planes[at : at + 4], axis=1).reshape(-1) for at in range(0, len(planes), 4)]
    values = np.concatenate(blocks) if blocks else np.zeros(0, np.uint8)
    vectors = values.view("<f4").reshape(num_vectors, size)
    if not np.isfinite(vectors).all():
        raise BadMaster("a value that isn't finite")
    return list(vectors)


def _plane(piece: bytes, length: int) -> npt.NDArray[np.uint8]:
    if len(piece) < length:
        try:
            if zstandard.frame_content_size(piece) != length:
                raise BadMaster("a frame that states another length than its plane's")
            piece = zstandard.ZstdDecompressor().decompress(piece, max_output_size=length, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise BadMaster(str(error)) from error
    return np.frombuffer(piece, np.uint8)


def master_sha(vectors: list[Vector]) -> str:
    return hashlib.sha256(b"".join(vector.astype("<f4").tobytes() for vector in vectors)).hexdigest()
