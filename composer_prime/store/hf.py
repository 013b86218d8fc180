"""Hugging Face buckets, through their S3 endpoint; hf://buckets/<namespace>/<bucket>/prefix.

Their own protocol has no conditional write, and its client's listing cache misleads a poller, so sites use S3 there.
The credentials are S3 keys made for the account, not the Hub's token.
"""

import os
import re

from composer_prime.errors import ConfigError
from composer_prime.store.s3 import S3Settings, S3Store

ENDPOINT = "https://s3.hf.co/{namespace}"
ENDPOINT_VARIABLE = "COMPOSER_PRIME_HF_S3_ENDPOINT"
"""Environment variable that replaces the whole endpoint, namespace included: for a mirror, or a test."""

REGION = "us-east-1"
"""The only one that the endpoint has, wherever AWS_DEFAULT_REGION says that our other buckets are."""
PART_BYTES = 2**30
"""`put` goes in one request below twice this size: parts are what such endpoints keep least well."""
READ_TIMEOUT_S = 120
"""Silence after which a request counts as lost: the server stores up to 2 GiB before it answers a put."""

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def open_hf(place: str) -> S3Store:
    """The store at hf://`place`, where `place` is 'buckets/<namespace>/<bucket>' and may go on with a prefix. No I/O.

    Credentials are S3 keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or a profile). AWS_ENDPOINT_URL and
    AWS_DEFAULT_REGION are not looked at. ConfigError when `place` names no bucket.
    """
    kind, _, rest = place.partition("/")
    namespace, _, rest = rest.partition("/")
    bucket, _, prefix = rest.partition("/")
    if kind != "buckets" or not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"store URI (hf://{place}) must name a namespace and a bucket: write hf://buckets/namespace/bucket/prefix"
        )
    return S3Store(bucket, prefix.strip("/"), _settings(namespace))


def _settings(namespace: str) -> S3Settings:
    return S3Settings(
        uri=f"hf://buckets/{namespace}/{{bucket}}",
        endpoint=os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT.format(namespace=namespace),
        part_bytes=PART_BYTES,
        read_timeout_s=READ_TIMEOUT_S,
        config={"region_name": REGION, "s3": {"addressing_style": "path"}},
        credentials_remedy=(
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to S3 keys of the Hugging Face account (not a Hub token) "
            "that may list, read, write and delete there"
        ),
        network_remedy="check the network, then try again",
    )
