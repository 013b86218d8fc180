"""From a URI to a store: which backend a scheme names.

Backends are imported when their scheme is opened, so that the command line starts fast and a run in a folder needs no
client of any bucket.
"""

from importlib import import_module
from pathlib import Path

from composer_prime.errors import ConfigError
from composer_prime.store.base import Store

SCHEMES = (
    "file:///absolute/folder (or a plain path), s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, "
    "hf://buckets/namespace/bucket/prefix, gateway+https://host/run, memory://name"
)


def open_store(uri: str, key_file: Path | None = None) -> Store:
    """The store `uri` names. Does no I/O: `probe_store` or the first use finds out whether it can be reached.

    uri    a plain path (relative to the working directory, '~' is expanded), or file:///folder, both taken literally;
           s3://bucket/prefix, with endpoint and credentials as the AWS tools take them (AWS_ENDPOINT_URL,
           AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, roles; with boto3 profiles too);
           gs://bucket/prefix, with Google's application default credentials;
           az://container/prefix, with AZURE_STORAGE_ACCOUNT_NAME and what else Azure's tools take;
           hf://buckets/namespace/bucket/prefix, with S3 keys of that account where the AWS tools take them;
           gateway+https://host/run (or gateway+http://), as the site whose key file is given;
           or memory://name, which lives and dies with this process.
    key_file   of the site that a gateway shall know us as; None: the file that COMPOSER_PRIME_KEY names.

    ConfigError for an unknown scheme, or a URI that names no place.
    """
    scheme, separator, rest = uri.partition("://")
    if not uri:
        raise ConfigError(f"store URI is empty: write one of {SCHEMES}")
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
