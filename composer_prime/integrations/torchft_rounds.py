"""What the replicas of a torchft run write into the bucket, and who of them makes a round: records, decisions, bytes.

Pure: the I/O and the waiting are `composer_prime.integrations.torchft`'s.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer_prime.sync.canonical import Record

# --- records --------------------------------------------------------------------------------------------------------


class RunTerms(Record):
    """What the replicas of a run agree on."""

    num_replicas: int
    min_replicas: int


class Contribution(Record):
    """One replica's part in one round. Without a payload it came too late, and is a sign of life."""

    replica: str
    base: str
    """What the payload stands on, see `_Round.base`: only equal ones can be averaged."""
    payload: str | None = None
    sha256: str | None = None


class Decision(Record):
    """Whose contributions make a round. None: the round is void, and every replica is told not to commit."""

    base: str
    taken: tuple[Contribution, ...]
    closer: str


# --- decisions ------------------------------------------------------------------------------------------------------


def common_base(bases: Mapping[str, str]) -> str:
    """The base on which most replicas stand; where two have as many, that of the first replica by name."""
    counts = Counter(bases[replica] for replica in sorted(bases))
    return counts.most_common(1)[0][0]


def who_takes_part(
    ready: Collection[str], seen: Collection[str], awaited: Collection[str] | None, time_is_up: bool, terms: RunTerms
) -> tuple[str, ...] | None:
    """The replicas that make a round, sorted; () makes it void; None: keep waiting.

    ready     replicas whose contributions can be averaged
    seen      all that contributed
    awaited   those that gave a sign of life in the round before; None in the first round, which waits for all
    """
    everyone = len(seen) >= terms.num_replicas or (awaited is not None and set(awaited) <= set(seen))
    if len(ready) >= terms.min_replicas and (everyone or time_is_up):
        return tuple(sorted(ready))
    return () if time_is_up else None


# --- tensors --------------------------------------------------------------------------------------------------------


def pack(tensors: Sequence[Tensor]) -> bytes:
    """The raw bytes of CPU tensors, one after the other."""
    return b"".join(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


def unpack(data: bytes, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the shapes and dtypes of `like` out of what `pack` gave. ValueError when the length differs."""
    if len(data) != sum(tensor.nbytes for tensor in like):
        raise ValueError(f"{len(data)} bytes, {sum(tensor.nbytes for tensor in like)} are needed")
    raw, tensors, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), [], 0
    for tensor in like:
        piece = raw[start : start + tensor.nbytes].clone()
        tensors.append(piece.view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes
    return tensors


def hash_state(digest: "hashlib._Hash", value: Any) -> None:
    """Feed nested dicts and lists of tensors and plain values to a digest, dicts by sorted keys."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(pack([value]))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            hash_state(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            hash_state(digest, item)
    else:
        digest.update(f"{value!r};".encode())
