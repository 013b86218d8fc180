"""A store over an fsspec filesystem that its user brings, if its class is known to create atomically.

fsspec's own `pipe_file(mode="create")` looks and then writes, and most classes keep that, `HfFileSystem` too: of two
writers both win. s3fs sends the condition with the bytes. It knows no deadline, so ours is kept around its coroutines.
"""

from pathlib import PurePosixPath
from typing import Any

from composer_prime.errors import StoreUnusable
from composer_prime.store.base import check_key
from composer_prime.store.remote import Answer, RemoteStore

ATOMIC = ("s3fs.core.S3FileSystem",)


class FsspecStore(RemoteStore):
    """Store over a filesystem; see `composer_prime.store.base.Store` for what the methods promise."""

    _failures = (OSError, ValueError)
    _credentials_remedy = "give the filesystem credentials that may list, read, write and delete there"

    def __init__(self, filesystem: Any, bucket: str, prefix: str = "") -> None:
        """No I/O. StoreUnusable for a class that isn't one of ATOMIC, StoreError for a prefix that is no key.

        filesystem   such as `S3FileSystem(use_listings_cache=False, skip_instance_cache=True)`
        """
        kind, protocol = type(filesystem), filesystem.protocol
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        super().__init__(f"{scheme}://{bucket}/{prefix and check_key(prefix)}".rstrip("/"))
        if f"{kind.__module__}.{kind.__qualname__}" not in ATOMIC:
            raise StoreUnusable(
                f"store {self.uri} can't be used: {kind.__qualname__} is not known to create a file atomically (known: "
                f"{', '.join(ATOMIC)}): open the bucket by its URI, or use a folder"
            )
        self._filesystem = filesystem
        self._root = PurePosixPath(bucket, prefix)
        self._endpoint = kind.__name__

    def _do(self, left_s: float | None, name: str, *args: Any, **more: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self._filesystem.loop, getattr(self._filesystem, name), *args, timeout=left_s, **more)

    def _fetch(self, key: str, left_s: float, span: tuple[int, int] | None) -> bytes:
        start, end = (None, None) if span is None else (span[0], span[1] + 1)
        return self._do(left_s, "_cat_file", str(self._root / key), start=start, end=end)

    def _store(self, key: str, data: bytes | memoryview, left_s: float, *, if_absent: bool) -> None:
        mode = "create" if if_absent else "overwrite"
        self._do(left_s, "_pipe_file", str(self._root / key), bytes(data), mode=mode)

    def _names(self, prefix: str, left_s: float) -> list[str]:
        folder, _, start = prefix.rpartition("/")
        self._filesystem.invalidate_cache()
        found = self._do(left_s, "_find", str(self._root / folder), prefix=start)
        return [str(PurePosixPath(name).relative_to(self._root)) for name in found]

    def _remove(self, key: str, left_s: float) -> None:
        self._do(left_s, "_rm_file", str(self._root / key))

    def _answer(self, error: BaseException) -> Answer:
        at: BaseException | None = error
        while at is not None:  # where a server answered, botocore's error is behind
            if isinstance(response := getattr(at, "response", None), dict):
                said, status = response.get("Error", {}), response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                return Answer(int(status), str(said.get("Code", "")), str(said.get("Message", "")) or str(error))
            at = at.__cause__
        for kind, status, code in ((FileNotFoundError, 404, "NoSuchKey"), (FileExistsError, 412, "FileExists")):
            if isinstance(error, kind):
                return Answer(status, code, str(error))
        return Answer(0, "", str(error) or "timed out")
