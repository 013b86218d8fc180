"""Stored traces: JSON lines of token ids, cut into turns that can be answered again.

A line is one conversation, in either of two shapes. Flat: `token_ids` and `mask`, true where the teacher wrote (and
`logprobs`, one a token, where there are some). Or a verifiers trace as verifiers and PRIME-RL write them to disk, or an
episode that holds some in `traces`. A file that ends in .zst is read through zstd.
"""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput

MAX_LINE_BYTES = 2**27
"""Of one conversation; a packed file may hold endless ones."""


@dataclass(frozen=True)
class Turn:
    """What a teacher wrote at one point of a conversation.

    prompt      all token ids before it
    completion  its token ids, at least one
    logprobs    nats, one for each of `completion`; None where they weren't stored
    """

    prompt: list[int]
    completion: list[int]
    logprobs: list[float] | None


def read_turns(path: Path) -> Iterator[Turn]:
    """The turns of a file's conversations, in its order.

    Raises BadInput naming the line that isn't a conversation, or when the file can't be read or holds no turn.
    """
    found = False
    for number, line in _lines(path):
        try:
            for turn in turns_of(json.loads(line)):
                found = True
                yield turn
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BadInput(
                f"{path}, line {number}, isn't a stored trace ({type(error).__name__}: {error}): give an object with "
                "token_ids and mask, or a verifiers trace with nodes"
            ) from error
    if not found:
        raise BadInput(f"{path} holds no token that a teacher wrote: give traces that were recorded with token ids")


def turns_of(record: dict[str, Any]) -> Iterator[Turn]:
    """The turns of one stored record. Raises ValueError, KeyError and their like when it isn't one."""
    if "traces" in record:
        for trace in record["traces"]:
            yield from turns_of(trace)
    elif "nodes" in record:
        yield from _trace_turns(record["nodes"])
    else:
        yield from _flat_turns([], record["token_ids"], record["mask"], record.get("logprobs"))


def _trace_turns(nodes: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """A verifiers trace: the prompt of a node is the path to it; its logprobs are of the sampled tokens alone."""
    for node in nodes:
        if not any(node.get("mask") or ()):
            continue
        before: list[int] = []
        parent = node.get("parent")
        while parent is not None:
            before[:0] = nodes[parent]["token_ids"]
            parent = nodes[parent].get("parent")
        compact = iter(node.get("logprobs") or ())
        spread = [next(compact) if is_sampled else 0.0 for is_sampled in node["mask"]] if node.get("logprobs") else None
        yield from _flat_turns(before, node["token_ids"], node["mask"], spread)


def _flat_turns(
    before: list[int], token_ids: Sequence[int], mask: Sequence[bool], logprobs: Sequence[float] | None
) -> Iterator[Turn]:
    """One turn for every stretch of `mask`; `before` stands in front of all."""
    if len(mask) != len(token_ids) or (logprobs is not None and len(logprobs) != len(token_ids)):
        raise ValueError(f"token_ids has {len(token_ids)} entries, and mask or logprobs another number")
    if not all(type(token) is int and token >= 0 for token in token_ids):
        raise ValueError("token_ids must be whole numbers from 0")
    start = 0
    while start < len(mask):
        stop = start
        while stop < len(mask) and mask[stop]:
            stop += 1
        if stop > start:
            scores = None if logprobs is None else [float(one) for one in logprobs[start:stop]]
            yield Turn([*before, *token_ids[:start]], list(token_ids[start:stop]), scores)
        start = stop + 1


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that aren't blank, counted from 1."""
    import zstandard

    try:
        with path.open("rb") as file:
            is_packed = path.suffix == ".zst"
            lines = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file)) if is_packed else file
            for number, line in enumerate(iter(partial(lines.readline, MAX_LINE_BYTES), b""), start=1):
                if len(line) == MAX_LINE_BYTES:
                    raise BadInput(f"{path}, line {number}, has more than {MAX_LINE_BYTES} bytes: it is not read")
                if line.strip():
                    yield number, line.decode()
    except (OSError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise BadInput(f"{path} can't be read: {error}: give a .jsonl file, or a .jsonl.zst") from error
