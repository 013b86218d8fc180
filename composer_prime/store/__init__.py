"""Bytes at keys in a bucket: all that sites share. Where each object of a run lies is spelled in `store.keys`.

`open_store(uri)` opens a folder, a bucket or this process's memory; `probe_store(store)` refuses one that can't be used
or that lets two writers win, and `race_store(store)` does so under racing writers. Backends are imported when their
scheme is opened, so that the command line starts fast and a run in a folder needs no client of any bucket.
"""

from importlib import import_module
from pathlib import Path

from composer_prime.errors import ConfigError
from composer_prime.store.base import Store
from composer_prime.store.probe import probe_store, race_store

__all__ = ["Store", "open_store", "probe_store", "race_store"]

SCHEMES = (
    "file:///absolute/folder (or a plain path), s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, "
    "hf://buckets/namespace/bucket/prefix, gateway+https://host/run, memory://name"
)


def open_store(uri: str, key_file: Path | None = None) -> Store:
    """The store `uri` names. Does no I/O: `probe_store` or the first use finds out whether it can be reached.

    uri        one of SCHEMES. A path may be relative to the working directory, and '~' is expanded; file:/// is taken
               literally. Buckets take endpoint and credentials from the environment, as their services' own tools do;
               hf:// takes S3 keys of the account where the AWS tools take them. memory:// dies with this process.
    key_file   of the site that a gateway shall know us as; None: the file that COMPOSER_PRIME_KEY names.

    ConfigError for an unknown scheme, or a URI that names no place.
    """
    if not uri:
        raise ConfigError(f"store URI is empty: write one of {SCHEMES}")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        scheme, rest = "file", str(Path(uri).expanduser().absolute())
    if scheme == "file":
        from composer_prime.store.file import FileStore

        return FileStore(rest)
    if scheme in ("gateway+https", "gateway+http"):
        # Named, not imported: the gateway's room lies above this one.
        open_gateway = import_module("composer_prime.gateway.store").open_gateway
        return open_gateway(scheme.removeprefix("gateway+"), rest, key_file)
    if scheme not in ("s3", "gs", "az", "hf", "memory"):
        raise ConfigError(f"store URI ({uri}) has an unknown scheme ({scheme}://): use one of {SCHEMES}")
    from composer_prime.store.obstore import open_bucket

    return open_bucket(scheme, rest)
