"""A site that only serves a run: takes each new snapshot, and has its server load it.

Folders are `version_00000004` with a link `newest`; every one is a whole model, so a server can be started from it.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from composer_prime.errors import BadInput, CorruptObject, ModelError, SiteError, StoreError
from composer_prime.export.bits import DTYPES, bits_sha256
from composer_prime.export.card import RECORD_FILE, SnapshotRecord
from composer_prime.export.lora import is_lora
from composer_prime.export.model import HfModel
from composer_prime.export.reading import MasterReader
from composer_prime.export.server import ServerDown, WeightServer
from composer_prime.export.snapshot import describe, fill_from_masters, write_folder

KEEP_FOLDERS = 2
"""The folder that the server holds, and the one before, which it may still be reading."""
ATTEMPTS = 5
"""Updates in a row that a healthy server may fail before following it ends."""

_FOLDER = re.compile(r"version_(\d{8})")
_NEWEST = "newest"

logger = logging.getLogger(__name__)


class Follower:
    """Keeps a folder, and a server if there is one, at a run's newest weights. `look` again and again."""

    def __init__(
        self,
        reader: MasterReader,
        base: Path,
        dtype: str,
        folder: Path,
        server: WeightServer | None,
        *,
        say: Callable[[str], object],
    ) -> None:
        """
        base    folder of the model that the run was created from
        folder  where snapshots are kept; those of an earlier follower of this run are gone on from
        say     takes a line for people

        Raises ModelError when the base isn't the run's.
        """
        if is_lora([name for fragment in reader.run.fragments for name in fragment.names]):
            raise BadInput(
                "the run trains LoRA adapters, which can't be followed: `composer-prime export` its versions"
            )
        self._reader = reader
        self._dtype = dtype
        self._folder = folder
        self._server = server
        self._say = say
        self._fault: str | None = None
        self._told: int | None = None
        self._is_down = False
        self._failures = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._model, self._held = self._resume(base) or (HfModel(base, DTYPES[dtype], reader.run.fragments), None)

    @property
    def version(self) -> int | None:
        """The version that the folder holds; None before the first."""
        return None if self._held is None else self._held.version

    def look(self) -> bool:
        """Take what is new, and see to the server. True when nothing is left to do for now.

        Raises SiteError when the server refuses the weights or keeps failing, ProtocolError or BadInput when the
        bucket can't be followed; a store or server that is down is waited for.
        """
        is_current = self._take_newest()
        return self._see_to_server() and is_current and self._held is not None

    # --- the bucket -------------------------------------------------------------------------------------------------

    def _take_newest(self) -> bool:
        """Whether the folder holds the newest version now."""
        try:
            self._reader.refresh()
            newest = self._reader.newest_version()
            if self._held is not None and newest <= self._held.version:
                return True
            made = fill_from_masters(self._reader, self._model, newest)
            self._say(f"version {newest}: {self._reader.nbytes(newest):,} bytes fetched")
        except StoreError as error:
            if str(error) != self._fault:
                self._say(f"the bucket can't be read now, looking again until it can: {error}")
            self._fault = str(error)
            return False
        self._fault = None
        held = describe(self._reader, self._model, made)
        self._write(held)
        self._held = held
        return True

    # --- the folder -------------------------------------------------------------------------------------------------

    def _resume(self, base: Path) -> tuple[HfModel, SnapshotRecord] | None:
        """What an earlier follower of this run left last, if it is whole and of our dtype."""
        for version in reversed(self._versions()):
            folder = self._place(version)
            try:
                record = SnapshotRecord.from_bytes((folder / RECORD_FILE).read_bytes(), RECORD_FILE)
                if (record.manifest_sha256, record.dtype) != (self._reader.run.sha256, self._dtype):
                    raise ModelError("it is of another run or dtype")
                model = HfModel(folder, DTYPES[self._dtype], self._reader.run.fragments)
                for index, fragment in enumerate(record.fragments):
                    if bits_sha256(model.read(index)) != fragment.bits_sha256:
                        raise ModelError(f"fragment {index} isn't what its record says")
            except (OSError, CorruptObject, ModelError) as error:
                self._say(f"{folder} isn't gone on from: {error}")
                shutil.rmtree(folder)
                continue
            model.base = base
            return model, record
        return None

    def _write(self, record: SnapshotRecord) -> None:
        """Put the snapshot in place, let `newest` point to it, and drop old ones. Raises SiteError."""
        folder = self._place(record.version)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            write_folder(self._model, record, folder)
            link = self._folder / f".{_NEWEST}"
            link.unlink(missing_ok=True)
            link.symlink_to(folder.name)
            os.replace(link, self._folder / _NEWEST)
            for old in self._versions()[:-KEEP_FOLDERS]:
                shutil.rmtree(self._place(old))
        except OSError as error:
            raise SiteError(f"{folder} can't be written ({error}): make room for {KEEP_FOLDERS + 1} models") from error

    def _versions(self) -> list[int]:
        found = (_FOLDER.fullmatch(one.name) for one in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _place(self, version: int) -> Path:
        return self._folder / f"version_{version:08d}"

    # --- the server -------------------------------------------------------------------------------------------------

    def _see_to_server(self) -> bool:
        """Whether the server holds what the folder does, as far as it can be known."""
        if self._server is None or self._held is None:
            return True
        if not self._server.is_ready():
            if not self._is_down:
                self._say(f"the server at {self._server.url} isn't up: waiting for it")
            self._is_down, self._told = True, None  # it starts with other weights
            return False
        if self._is_down:
            self._say(f"the server at {self._server.url} is up")
            self._is_down = False
        version = self._held.version
        if self._told == version and self._server.held_version() in (None, version):
            return True
        try:
            self._server.update(self._place(version).absolute(), version)
        except ServerDown as error:
            self._failures += 1
            if self._failures >= ATTEMPTS:
                raise SiteError(f"{error}; {ATTEMPTS} times in a row, see the server's log") from error
            self._say(f"{error}; trying again ({self._failures} of {ATTEMPTS})")
            return False
        self._failures, self._told = 0, version
        self._say(f"version {version}: the server at {self._server.url} has it")
        return True
