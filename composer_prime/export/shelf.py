"""Whole snapshots in the run's bucket, file by file under the names that Hugging Face's loaders look for.

For tools that know nothing of us: copy one folder out of the bucket and load it. The record is put last, so a folder
that has it is whole; a folder's name holds the hash of its files, so nothing is ever overwritten with other bytes.
"""

import hashlib
import mmap
import tempfile
from pathlib import Path

from composer_prime.export.card import RECORD_FILE, SnapshotRecord
from composer_prime.export.model import Exportable
from composer_prime.export.reading import MasterReader
from composer_prime.export.snapshot import card_of, describe, fill_from_masters, write_folder
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex

KEEP_FOLDERS = 2
"""Folders kept of a dtype: the newest, and the one before, which somebody may be copying."""


class Shelf:
    """Keeps the newest snapshots of a run on it, in one dtype. `tick` again and again."""

    def __init__(self, reader: MasterReader, model: Exportable, base_name: str) -> None:
        """model: what the masters are written into; base_name: the model that the run was created from."""
        self._reader = reader
        self._model = model
        self._base_name = base_name
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._version = max(self._shelved(), default=-1)

    def tick(self) -> str | None:
        """Put the newest version there, if it is newer than what is; the folder's prefix, or None."""
        version = self._reader.newest_version()
        if version <= self._version:
            return None
        record = describe(self._reader, self._model, fill_from_masters(self._reader, self._model, version))
        with tempfile.TemporaryDirectory(prefix="composer-prime-snapshot-") as scratch:
            folder = Path(scratch) / "snapshot"
            write_folder(self._model, record, folder, card_of(self._reader, self._model, record, self._base_name))
            prefix = put_folder(self._reader.store, folder, record)
        self._version = version
        for old in sorted(self._shelved())[:-KEEP_FOLDERS]:
            self._drop(old)
        return prefix

    def _shelved(self) -> set[int]:
        """Versions whose folders are whole."""
        listed = self._reader.store.list(keys.snapshots_prefix(self._dtype))
        found = (keys.snapshot_version(key) for key in listed if key.endswith(f"/{RECORD_FILE}"))
        return {version for version in found if version is not None}

    def _drop(self, version: int) -> None:
        """Delete a version's folders, record first."""
        listed = self._reader.store.list(keys.snapshots_prefix(self._dtype))
        doomed = [key for key in listed if keys.snapshot_version(key) == version]
        for key in sorted(doomed, key=lambda key: not key.endswith(f"/{RECORD_FILE}")):
            self._reader.store.delete(key)


def put_folder(store: Store, folder: Path, record: SnapshotRecord) -> str:
    """Put a snapshot's files into a bucket, its record last, and return their prefix."""
    files = sorted(folder.iterdir(), key=lambda file: file.name == RECORD_FILE)
    listing = "".join(f"{file.name} {_sha256(file)}\n" for file in sorted(files))
    prefix = keys.snapshot_prefix(record.dtype, record.version, sha256_hex(listing.encode()))
    for file in files:
        with file.open("rb") as opened:
            if file.stat().st_size == 0:
                store.put(prefix + file.name, b"")
                continue
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
                store.put(prefix + file.name, data)
    return prefix


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
