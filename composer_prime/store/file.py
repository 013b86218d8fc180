"""A store in a folder: one file per object, for sites on one machine or on a shared file system.

Bytes are written to a hidden temporary file beside their place, then linked (`create`) or renamed (`put`) there: the
only two acts of a POSIX file system that are whole or not at all, and of which exactly one link can win. The file is
synced before it gets its name and its folder after, so what a write has answered outlasts a power cut: a commit that
outlived the payloads it takes would hold up every site for ever.

A folder may vanish and come back, as mounted shares do. Nothing is written or read meanwhile, and nobody makes it anew.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from composer_prime.errors import ConfigError, KeyMissing, StoreError, remedy_of
from composer_prime.private import make_folder, share, sync_folder
from composer_prime.store import keys
from composer_prime.store.base import Store

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class FileStore(Store):
    """Store over a folder; see `composer_prime.store.base.Store` for what the methods promise."""

    def __init__(self, root: Path | str, *, shared: bool = True) -> None:
        """Use the folder `root` (absolute), which the first write makes; opening touches nothing on disk.

        shared   whether files and folders are for others, by the user's umask, though this process keeps its own

        Once this store has seen the folder it makes none, and takes no other for it, unless that holds a run's
        manifest: a share that was mounted anew, or a backup. ConfigError when `root` is relative.
        """
        if not os.path.isabs(root):
            raise ConfigError(f"store folder ({root}) must be absolute: write file:///path/to/folder or a plain path")
        self._root = os.path.normpath(root)
        self.root = Path(self._root)
        self.uri = f"file://{self._root}"
        self._share = share if shared else lambda path, mode: None
        self._seen: tuple[int, int] | None = None
        """Device and inode of the folder, once it was there."""

    def _create(self, key: str, data: bytes) -> bool:
        with self._writing("create", key, data) as (temporary, path):
            try:
                os.link(temporary, path)
                return True
            except FileExistsError:
                with suppress(FileNotFoundError, IsADirectoryError), open(path, "rb") as file:
                    return file.read(len(data) + 1) == data
                return False

    def _put(self, key: str, data: bytes | memoryview) -> None:
        with self._writing("put", key, data) as (temporary, path):
            os.replace(temporary, path)

    def _read(self, key: str, span: tuple[int, int] | None) -> bytes:
        start, length = span or (0, -1)
        with self._failures("get", key), open(os.path.join(self._root, key), "rb") as file:
            file.seek(start)
            return file.read(length)

    def _list(self, prefix: str) -> list[str]:
        def told(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        found: list[str] = []
        root, cut = os.path.join(self._root, prefix.rpartition("/")[0]), len(self._root) + 1
        with self._failures("list", prefix):
            for folder, folders, files in os.walk(root, onerror=told):
                folders[:] = [name for name in folders if not name.startswith(".")]
                found += [os.path.join(folder, name)[cut:] for name in files]
        return found

    def _delete(self, key: str) -> None:
        path = os.path.join(self._root, key)
        with self._failures("delete", key), suppress(FileNotFoundError, NotADirectoryError):
            if not os.path.isdir(path):  # a folder is no object
                os.unlink(path)

    def _check_root(self) -> None:
        """Raise StoreError where the folder was seen before, and isn't there or is another one."""
        seen, found = self._seen, None
        with suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(self._root)
            found = status.st_dev, status.st_ino
        if seen not in (None, found) and not os.path.exists(os.path.join(self._root, keys.manifest())):
            raise StoreError(
                f"{self._root} is not there any more, or is another folder than it was and holds no run: mount it, or "
                "put it back; until then nothing is written or read"
            )
        self._seen = found or seen

    @contextmanager
    def _writing(self, act: str, key: str, data: bytes | memoryview) -> Iterator[tuple[str, str]]:
        """A new hidden file that holds `data`, and the place beside it that it may take until the end of this block.

        Afterwards the hidden name is gone, and the new one is on the disk, in the folder that is ours.
        """
        path = os.path.join(self._root, key)
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, f".{name[:64]}.{os.getpid()}-{secrets.token_hex(8)}")
        with self._failures(act, key):
            if self._seen is None:
                make_folder(self._root, self._share)
                self._check_root()
            make_folder(folder, self._share, self._root)  # a root that has vanished isn't made anew
            try:
                with open(temporary, "xb") as file:
                    self._share(file.fileno(), 0o666)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary, path
                sync_folder(folder)
                self._check_root()
            finally:
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(temporary)

    @contextmanager
    def _failures(self, act: str, key: str) -> Iterator[None]:
        """Turn the operating system's errors into ours; where the folder has vanished, that is the error."""
        if act != "get":
            self._check_root()
        try:
            yield
        except OSError as error:
            self._check_root()
            if act == "get" and error.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR):
                raise KeyMissing(f"no object at {key} in {self.uri}") from error
            cause, remedy = error.strerror or str(error), remedy_of(error) or "check the disk and the folder"
            if act == "create" and error.filename2 is not None and error.errno in _NO_HARD_LINKS:
                cause = f"{cause} (the file system can't make hard links)"
                remedy = "choose a folder on another file system, or an s3:// store"
            raise StoreError(f"{act} of {key or 'all keys'} in {self.uri} failed: {cause}: {remedy}") from error
