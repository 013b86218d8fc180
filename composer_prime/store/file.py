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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from composer_prime.errors import ConfigError, KeyMissing, StoreError, remedy_of
from composer_prime.private import share
from composer_prime.store import keys
from composer_prime.store.base import Backend

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


def sync_folder(folder: str | Path) -> None:
    """Return once the names in a folder are on the disk; at once where the system can't sync folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: str | Path, made: Callable[[str], object] = lambda path: None) -> None:
    """Make a folder, and those above it, whose names outlast a power cut; `made` is called for each."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(os.path.abspath(folder))
    make_folder(above, made)
    with suppress(FileExistsError):
        os.mkdir(folder)
        made(str(folder))
    sync_folder(above)


class FileStore(Backend):
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
        path = self._path(key)
        with self._failures("create", key), self._temporary_file(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                with suppress(FileNotFoundError, IsADirectoryError), open(path, "rb") as file:
                    return os.fstat(file.fileno()).st_size == len(data) and file.read() == data
                return False
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                raise StoreError(
                    f"create of {key} in {self.uri} failed: {error.strerror} (the file system can't make hard links): "
                    "choose a folder on another file system, or an s3:// store"
                ) from error
            self._confirm(path)
            return True

    def _put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        with self._failures("put", key), self._temporary_file(path, data) as temporary:
            os.replace(temporary, path)
            self._confirm(path)

    def _read(self, key: str, span: tuple[int, int] | None) -> bytes:
        start, length = span or (0, -1)
        with self._failures("get", key), open(self._path(key), "rb") as file:
            file.seek(start)
            return file.read(length)

    def _list(self, prefix: str) -> list[str]:
        found: list[str] = []
        root, cut = self._path(prefix.rpartition("/")[0]), len(self._root) + 1
        with self._failures("list", prefix):
            for folder, folders, files in os.walk(root, onerror=_raise_unless_absent):
                folders[:] = [name for name in folders if not name.startswith(".")]
                found += [os.path.join(folder, name)[cut:] for name in files]
        return found

    def _delete(self, key: str) -> None:
        path = self._path(key)
        with self._failures("delete", key), suppress(FileNotFoundError, NotADirectoryError):
            if not os.path.isdir(path):  # a folder is no object
                os.unlink(path)

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key) if key else self._root

    def _confirm(self, path: str) -> None:
        """Return once the new name of a file is on the disk, in the folder that is ours."""
        sync_folder(os.path.dirname(path))
        self._check_root()

    def _check_root(self) -> None:
        """Raise StoreError where the folder was seen before, and isn't there or is another one."""
        seen, found = self._seen, None
        with suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(self._root)
            found = status.st_dev, status.st_ino
        if seen not in (None, found) and not os.path.exists(self._path(keys.manifest())):
            raise StoreError(
                f"{self._root} is not there any more, or is another folder than it was and holds no run: mount it, or "
                "put it back; until then nothing is written or read"
            )
        self._seen = found or seen

    def _make_folder(self, folder: str) -> None:
        """Make a key's folder, and the root only where none was there yet."""
        if self._seen is None:
            make_folder(self._root, lambda path: self._share(path, 0o777))
            self._check_root()
        if folder != self._root and not os.path.isdir(folder):
            self._make_folder(os.path.dirname(folder))
            with suppress(FileExistsError):
                os.mkdir(folder)
                self._share(folder, 0o777)
            sync_folder(os.path.dirname(folder))

    @contextmanager
    def _temporary_file(self, path: str, data: bytes | memoryview) -> Iterator[str]:
        """A new hidden file in `path`'s folder that holds `data`; gone afterwards, unless it was renamed."""
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, f".{name[:64]}.{os.getpid()}-{secrets.token_hex(8)}")
        if not os.path.isdir(folder):
            self._make_folder(folder)
        try:
            with open(temporary, "xb") as file:
                self._share(file.fileno(), 0o666)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
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
            remedy = remedy_of(error) or "check the disk and the folder"
            raise StoreError(
                f"{act} of {key or 'all keys'} in {self.uri} failed: {error.strerror or error}: {remedy}"
            ) from error


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
