"""From a URI to a store: which backend a scheme names, and whether the store it opened can be trusted.

Backends are imported when their scheme is opened, so that the command line starts fast and a run in a folder needs no
S3 client.
"""

import os
import secrets
from pathlib import Path

from composer_prime.errors import ConfigError, StoreError, StoreUnusable
from composer_prime.store import keys
from composer_prime.store.base import Store

SCHEMES = "file:///absolute/folder (or a plain path), s3://bucket/prefix, memory://name"


def open_store(uri: str) -> Store:
    """The store `uri` names. Does no I/O: `probe_store` or the first use finds out whether it can be reached.

    uri    a plain path (relative to the working directory, '~' is expanded), or file:///folder, both taken literally;
           s3://bucket/prefix, with endpoint and credentials as the AWS tools take them (AWS_ENDPOINT_URL,
           AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, profiles); or memory://name, which lives and
           dies with this process.

    ConfigError for an unknown scheme or a URI that names no place.
    """
    scheme, separator, rest = uri.partition("://")
    if not uri:
        raise ConfigError(f"store URI is empty: write one of {SCHEMES}")
    if not separator:
        scheme, rest = "file", str(Path(uri).expanduser().absolute())
    if scheme == "file":
        from composer_prime.store.file import FileStore

        return FileStore(rest)
    if scheme in ("memory", "s3"):
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        if scheme == "memory":
            from composer_prime.store.memory import MemoryStore

            return MemoryStore(bucket, prefix)
        from composer_prime.store.s3 import S3Store

        return S3Store(bucket, prefix)
    raise ConfigError(f"store URI ({uri}) has an unknown scheme ({scheme}://): use one of {SCHEMES}")


def probe_store(store: Store) -> None:
    """Write, read and list a throw-away object, and make sure that a second writer of it loses; then remove it.

    StoreUnusable, naming the store and the cause, when the store can't be reached, read or written, or when it lets
    two writers of one key win: every site would then follow its own log.
    """
    key = keys.probe(f"{os.getpid()}-{secrets.token_hex(8)}")
    first, second = secrets.token_bytes(32), secrets.token_bytes(32)
    try:
        won = (store.create(key, first), store.create(key, second))
        held = store.get(key)
        listed = store.list(key)
        store.delete(key)
    except StoreError as error:
        raise StoreUnusable(f"store {store.uri} can't be used: {error}") from error
    if won != (True, False) or held != first:
        raise StoreUnusable(
            f"store {store.uri} does not keep create-if-absent (of two writers of one key, {sum(won)} won, and the "
            f"{'first' if held == first else 'second'} one's bytes stand; must be: 1, the first): use a store that "
            "honours If-None-Match (AWS S3, SeaweedFS, Ceph), or a folder"
        )
    if listed != [key]:
        raise StoreUnusable(
            f"store {store.uri} does not list what was just written (listed {listed}, must be {[key]}): "
            "use a store whose listings are consistent"
        )
