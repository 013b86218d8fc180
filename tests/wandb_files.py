"""What wandb keeps in a folder while it is offline."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, WHOLE, LAST = 32768, 1, 4
"""LevelDB's log format: bytes of a block, and the kinds of a chunk that end a record."""


def kept(file: Path) -> Iterator[bytes]:
    """The records in a file of wandb's: LevelDB's log format behind a header of seven bytes."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # too little is left of the block for a header: padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            yield record
            record = b""


def records(folder: Path) -> list[Any]:
    """All of the runs in a folder, in wandb's own classes."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return [Record.FromString(data) for file in files for data in kept(file)]


def history(folder: Path) -> list[dict[str, Any]]:
    """The metrics that wandb has kept for a later upload."""
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]
