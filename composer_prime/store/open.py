"""From a URI to a store: which backend a scheme names.

Backends are imported when their scheme is opened, so that the command line starts fast and a run in a folder needs no
S3 client.
"""

from pathlib import Path

from composer_prime.errors import INSTALL, ConfigError
from composer_prime.store.base import Store

SCHEMES = (
    "file:///absolute/folder (or a plain path), s3://bucket/prefix, gs://bucket/prefix, "
    "hf://buckets/namespace/bucket/prefix, gateway+https://host/run, memory://name"
)


def open_store(uri: str, key_file: Path | None = None) -> Store:
    """The store `uri` names. Does no I/O: `probe_store` or the first use finds out whether it can be reached.

    uri    a plain path (relative to the working directory, '~' is expanded), or file:///folder, both taken literally;
           s3://bucket/prefix, with endpoint and credentials as the AWS tools take them (AWS_ENDPOINT_URL,
           AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, profiles);
           gs://bucket/prefix, with Google's application default credentials;
           hf://buckets/namespace/bucket/prefix, with S3 keys of that account where the AWS tools take them;
           gateway+https://host/run (or gateway+http://), as the site whose key file is given;
           or memory://name, which lives and dies with this process.
    key_file   of the site that a gateway shall know us as; None: the file that COMPOSER_PRIME_KEY names.

    ConfigError for an unknown scheme, a URI that names no place, or a backend that isn't installed.
    """
    scheme, separator, rest = uri.partition("://")
    if not uri:
        raise ConfigError(f"store URI is empty: write one of {SCHEMES}")
    if not separator:
        scheme, rest = "file", str(Path(uri).expanduser().absolute())
    if scheme == "file":
        from composer_prime.store.file import FileStore

        return FileStore(rest)
    if scheme == "hf":
        from composer_prime.store.hf import open_hf

        return open_hf(rest)
    if scheme in ("gateway+https", "gateway+http"):
        from composer_prime.store.gateway import open_gateway

        return open_gateway(scheme.removeprefix("gateway+"), rest, key_file)
    if scheme in ("memory", "s3", "gs"):
        bucket, _, prefix = rest.partition("/")
        return _open_bucket(scheme, bucket, prefix.strip("/"))
    raise ConfigError(f"store URI ({uri}) has an unknown scheme ({scheme}://): use one of {SCHEMES}")


def _open_bucket(scheme: str, bucket: str, prefix: str) -> Store:
    if scheme == "memory":
        from composer_prime.store.memory import MemoryStore

        return MemoryStore(bucket, prefix)
    if scheme == "s3":
        from composer_prime.store.s3 import S3Store

        return S3Store(bucket, prefix)
    try:
        from composer_prime.store.gcs import GCSStore
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("composer_prime"):
            raise
        raise ConfigError(
            f"store gs://{bucket} needs a package that isn't installed ({error.name}): {INSTALL.format('gcs')}"
        ) from error
    return GCSStore(bucket, prefix)
