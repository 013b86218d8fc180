"""Write-ahead: what coding took from an offer, on this site's own disk before the offer's record is created (rule 12).

After a crash the bucket tells whether the offer was taken; only this journal knows the rest of the movement. A site
without a journal loses no more than that rest.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from composer_prime.errors import StoreError
from composer_prime.private import make_folder, sync_folder

logger = logging.getLogger(__name__)

KEPT = 2
"""Entries of each fragment: the newest offer's, and the one before, whose successor may never have been offered."""


class Journal(Protocol):
    """Residuals by the payload that leaves them."""

    def write(self, fragment: int, payload: str, residual: Tensor) -> None:
        """Remember what remains once `payload` is merged; it is there after a crash as soon as this returns."""
        ...

    def read(self, fragment: int, payload: str) -> Tensor | None:
        """What `write` was given for that payload; None when it isn't known."""
        ...


class FileJournal:
    """A journal in a folder of the site: one safetensors file for each of a fragment's last payloads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, fragment: int, payload: str, residual: Tensor) -> None:
        """See `Journal.write`. Raises StoreError when the disk doesn't take it: the offer waits until it does."""
        place = self._path(fragment, payload)
        temporary = place.with_suffix(".new")
        try:
            make_folder(self._folder)
            for left in self._folder.glob(f"{fragment:04d}-*.new"):  # of a process that was killed
                left.unlink(missing_ok=True)
            with temporary.open("wb") as file:
                values = residual.numpy().astype("<f4", copy=False).data
                file.write(_header(payload, residual.numel(), _sha256(values)))
                file.write(values)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, place)
            sync_folder(self._folder)
            entries = sorted(
                self._folder.glob(f"{fragment:04d}-*.safetensors"), key=lambda path: path.stat().st_mtime_ns
            )
            for old in entries[:-KEPT]:
                old.unlink()
        except OSError as error:
            temporary.unlink(missing_ok=True)  # it may be what fills the disk
            raise StoreError(
                f"{place} can't be written ({error.strerror}): free some space on the site's disk"
            ) from error

    def read(self, fragment: int, payload: str) -> Tensor | None:
        """See `Journal.read`. A damaged entry counts as none, with a warning."""
        path = self._path(fragment, payload)
        try:
            with safe_open(path, framework="pt") as file:
                noted = file.metadata() or {}
                if noted.get("payload") == payload:
                    residual = file.get_tensor("residual").clone()
                    if noted.get("sha256") == _sha256(residual.numpy().astype("<f4", copy=False).data):
                        return residual
                    logger.warning("journal_damaged path=%s error=%s", path, "its values differ from their sha256")
        except FileNotFoundError:
            pass
        except (OSError, SafetensorError) as error:
            logger.warning("journal_damaged path=%s error=%s", path, error)
        return None

    def _path(self, fragment: int, payload: str) -> Path:
        return self._folder / f"{fragment:04d}-{payload.rpartition('-')[2]}.safetensors"


def _sha256(values: memoryview) -> str:
    return hashlib.sha256(values).hexdigest()


def _header(payload: str, numel: int, sha256: str) -> bytes:
    """What stands before the values in a safetensors file of one fp32 vector; the library would copy them twice."""
    entry = {"dtype": "F32", "shape": [numel], "data_offsets": [0, 4 * numel]}
    header = {"__metadata__": {"payload": payload, "sha256": sha256}, "residual": entry}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
