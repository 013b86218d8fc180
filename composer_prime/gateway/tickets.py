"""Tickets for the bucket itself: URLs that read one object, or write these very bytes at one key, for a short time."""

import base64
from typing import Any

from composer_prime.errors import INSTALL, BadInput, StoreError
from composer_prime.gateway.wire import Ticket
from composer_prime.store.base import Store
from composer_prime.store.obstore import ObjectStore

EXPIRES_S = 120
"""How long a ticket lasts: so long may a site that is revoked just now still use the last one that it got."""
MAX_PUT_BYTES = 5 * 2**30
"""The most that S3 takes in one PUT."""


class Tickets:
    """Presigned URLs, signed with the gateway's own credentials, which the AWS tools' library finds."""

    def __init__(self, store: ObjectStore) -> None:
        """ModuleNotFoundError without botocore."""
        from botocore.config import Config
        from botocore.session import get_session

        place = store.place
        self._place, self._folder = place, f"{place.prefix}/" if place.prefix else ""
        self._client: Any = get_session().create_client(
            "s3",
            endpoint_url=place.endpoint or None,
            region_name=place.region or None,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"} if place.scheme == "hf" else None),
        )

    def to_read(self, key: str) -> Ticket:
        """For one object, whole or in part. Raises StoreError when the credentials can't be had."""
        return Ticket(self._signed("get_object", key))

    def to_write(self, key: str, nbytes: int, sha256: bytes, *, if_absent: bool) -> Ticket:
        """For these bytes at this key; with `if_absent` where nothing stands. Raises as `to_read`.

        Their length is part of what is signed, and their hash, which a store that knows S3's checksums compares.
        """
        checksum = base64.b64encode(sha256).decode()
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        url = self._signed("put_object", key, ContentLength=nbytes, ChecksumSHA256=checksum, **condition)
        headers = {"content-length": str(nbytes), "x-amz-checksum-sha256": checksum}
        return Ticket(url, headers | ({"if-none-match": "*"} if if_absent else {}))

    def _signed(self, operation: str, key: str, **more: Any) -> str:
        from botocore.exceptions import BotoCoreError

        place = {"Bucket": self._place.bucket, "Key": self._folder + key}
        try:
            return self._client.generate_presigned_url(operation, Params={**place, **more}, ExpiresIn=EXPIRES_S)
        except BotoCoreError as error:
            raise StoreError(f"presign of {key} failed: {error}: check the gateway's credentials") from error


def tickets_of(store: Store) -> Tickets | None:
    """What makes tickets for a store; None when its bytes must go through the gateway.

    BadInput where it could, but boto3 isn't installed, which signs what a request must hold.
    """
    if not isinstance(store, ObjectStore) or store.place.scheme not in ("s3", "hf"):
        return None
    try:
        return Tickets(store)
    except ModuleNotFoundError as error:
        raise BadInput(f"a gateway before {store.uri} needs boto3: {INSTALL.format('aws')}") from error
