"""A store in a bucket that speaks S3 (AWS, SeaweedFS, Ceph, ...), through botocore, which s3fs stands on too.

The one atomic act is a single-part PUT with `If-None-Match: *`. Endpoint, region and credentials come from where the
AWS tools take them, unless `S3Settings` say otherwise.
"""

import base64
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from botocore import UNSIGNED
from botocore import exceptions as botocore

from composer_prime.errors import ConfigError, KeyMissing, StoreError, StoreUnusable
from composer_prime.store.base import check_create, check_key, check_prefix, check_range, is_key
from composer_prime.store.remote import READ_TIMEOUT_S, Client, RemoteStore, Verdict, check_prefix_in_uri, is_anonymous
from composer_prime.store.s3_client import S3Client

log = logging.getLogger(__name__)

PART_BYTES = 16 * 2**20
"""`put` goes in parts of this size from twice this size on."""


_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}")
_CREDENTIALS_MISSING = (
    botocore.NoCredentialsError,
    botocore.PartialCredentialsError,
    botocore.CredentialRetrievalError,
    botocore.NoAuthTokenError,
    botocore.TokenRetrievalError,
    botocore.ProfileNotFound,
)
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}  # AWS says 400 to these
_ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_HIDDEN = "InvalidObjectState"
"""An object that its writer put into an archive: nobody reads it, and no credentials help."""
_HIDDEN_WORDS = "Server Side Encryption"
"""What AWS says (400 InvalidRequest) of an object that its writer encrypted with a key of its own."""


@dataclass(frozen=True)
class S3Settings:
    """What differs between services that speak S3. The defaults are for the AWS tools' own."""

    uri: str = "s3://{bucket}"
    """The store's URI without the prefix."""
    endpoint: str | None = None
    """URL that the bucket's name is put behind; None takes AWS_ENDPOINT_URL, or AWS."""
    part_bytes: int = PART_BYTES
    """`put` goes in one request below twice this size."""
    read_timeout_s: float = READ_TIMEOUT_S
    config: Mapping[str, Any] = field(default_factory=dict)
    """More of botocore's client configuration."""
    credentials_remedy: str = (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) to credentials that may list, read, write "
        "and delete there"
    )
    network_remedy: str = "check the network and AWS_ENDPOINT_URL, then try again"


class _Vanished(Exception):
    """What beat our create is not there when we read it back: still being written, or deleted. Worth another try."""


_UNANSWERED = (
    botocore.ConnectionError,
    botocore.HTTPClientError,
    botocore.IncompleteReadError,  # the connection ended between two reads of a body; within one, an HTTPClientError
    ConnectionError,
    TimeoutError,
    _Vanished,
)
_FAILURES = (*_UNANSWERED, botocore.BotoCoreError, botocore.ClientError, OSError)


class S3Store(RemoteStore):
    """Store over a bucket; see `composer_prime.store.base.Store` for what the methods promise."""

    _failures = _FAILURES

    def __init__(self, bucket: str, prefix: str = "", settings: S3Settings | None = None) -> None:
        """Use the objects of `bucket` under `prefix` ('' or segments as in keys, without outer slashes). No I/O.

        ConfigError for a name no bucket or key can have.
        """
        settings = settings or S3Settings()
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(
                f"store bucket ({bucket!r}) must be 3 to 63 letters, digits, '.', '_' or '-': "
                f"write {settings.uri.format(bucket='bucket')}/prefix"
            )
        check_prefix_in_uri(prefix, f"{settings.uri.format(bucket='bucket')}/prefix")
        super().__init__(f"{settings.uri.format(bucket=bucket)}/{prefix}".rstrip("/"))
        self._bucket = bucket
        self._folder = f"{prefix}/" if prefix else ""
        self._settings = settings
        self._credentials_remedy = settings.credentials_remedy

    def create(self, key: str, data: bytes) -> bool:
        check_create(key, data)
        name = self._folder + key

        def attempt(client: S3Client, left_s: float) -> bool:
            try:
                client.put(name, data, left_s, if_absent=True)
                return True
            except _FAILURES as error:
                if not _has_lost(error):
                    raise
            try:
                return client.get(name, left_s, (0, len(data))) == data
            except botocore.ClientError as error:
                if _answer(error)[0] == 416:  # nothing stands there, in no bytes
                    return not data
                if _answer(error)[0] == 404:
                    raise _Vanished from error
                raise

        return self._run("create", key, attempt, num_bytes=2 * len(data))

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)

        def attempt(client: S3Client, left_s: float) -> None:
            client.put(self._folder + key, data, left_s)

        self._run("put", key, attempt, num_bytes=len(data))

    def get(self, key: str) -> bytes:
        check_key(key)

        def attempt(client: S3Client, left_s: float) -> bytes:
            return client.get(self._folder + key, left_s)

        return self._run("get", key, attempt, num_bytes=None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)
        last = start + max(length, 1) - 1  # HTTP can't ask for no byte, and a missing object must still be noticed

        def attempt(client: S3Client, left_s: float) -> bytes:
            try:
                return client.get(self._folder + key, left_s, (start, last))[:length]
            except botocore.ClientError as error:
                if _answer(error)[0] == 416:
                    return b""
                raise

        return self._run("get", key, attempt, num_bytes=length)

    def list(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        names: list[str] = []
        page: dict[str, Any] = {"IsTruncated": True}
        following: dict[str, str] = {}
        while page.get("IsTruncated"):
            page = self._run(
                "list",
                prefix,
                lambda client, left_s, after=following: client.list_page(self._folder + prefix, **after),
            )
            names += [item["Key"].removeprefix(self._folder) for item in page.get("Contents", [])]
            following = {"ContinuationToken": page.get("NextContinuationToken", "")}
        return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        check_key(key)

        try:
            self._run("delete", key, lambda client, left_s: client.delete(self._folder + key))
        except KeyMissing:
            log.debug("store=%s delete of absent key=%s", self.uri, key)

    def presign_get(self, key: str, expires_s: int) -> str:
        """A URL that reads one object until `expires_s` seconds from now, whoever holds it."""
        check_key(key)

        def attempt(client: S3Client, left_s: float) -> str:
            return client.presign("get_object", self._folder + key, expires_s)

        return self._run("presign", key, attempt)

    def presign_put(
        self, key: str, expires_s: int, *, nbytes: int, sha256: bytes, if_absent: bool
    ) -> tuple[str, dict[str, str]]:
        """A URL that writes these very bytes at one key, and the headers that the request must have.

        nbytes, sha256   of the bytes: their length is part of what is signed, and their hash, which a store that knows
                         S3's checksums compares with what it got
        if_absent        only where nothing stands
        """
        check_key(key)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        checksum = base64.b64encode(sha256).decode()

        def attempt(client: S3Client, left_s: float) -> str:
            signed = {"ContentLength": nbytes, "ChecksumSHA256": checksum, **condition}
            return client.presign("put_object", self._folder + key, expires_s, **signed)

        headers = {"content-length": str(nbytes), "x-amz-checksum-sha256": checksum}
        headers |= {"if-none-match": "*"} if if_absent else {}
        return self._run("presign", key, attempt), headers

    def _connect(self) -> Client:
        settings = self._settings
        return S3Client(
            self._bucket,
            endpoint=settings.endpoint,
            part_bytes=settings.part_bytes,
            read_timeout_s=settings.read_timeout_s,
            config={**settings.config, **({"signature_version": UNSIGNED} if is_anonymous() else {})},
        )

    def _disconnect(self, client: Client) -> None:
        client.close()

    def _look(self, client: Client, left_s: float) -> object:
        return client.look(self._folder, left_s)

    def _verdict(self, error: Exception) -> Verdict:
        status, code = _answer(error)
        if isinstance(error, _CREDENTIALS_MISSING) or code in _EXPIRED:
            return Verdict.REFUSED
        if status in (401, 403) and code not in _ELSEWHERE and code != _HIDDEN:
            return Verdict.REFUSED
        if not status:
            return Verdict.PASSES if isinstance(error, _UNANSWERED) else Verdict.LASTS
        passes = status in (408, 409, 425, 429) or (status >= 500 and status != 501) or code == "SlowDown"
        return Verdict.PASSES if passes else Verdict.LASTS

    def _cause(self, error: Exception) -> str:
        status, code = _answer(error)
        missing = "no credentials" if isinstance(error, _CREDENTIALS_MISSING) else type(error).__name__
        return f"{_words(error)} ({code or status or missing})"

    def _translated(self, what: str, key: str, error: Exception) -> Exception:
        status, code = _answer(error)
        if code == "NoSuchBucket" or (status == 404 and not key):
            return StoreUnusable(f"{what} failed: there is no bucket {self._bucket}: make it or correct the URI")
        if status == 301 or code in _ELSEWHERE:
            return StoreUnusable(
                f"{what} failed: {_words(error)} ({code}): set AWS_DEFAULT_REGION to the bucket's region"
            )
        if status == 404:
            return KeyMissing(f"no object at {key} in {self.uri}")
        if code == _HIDDEN or (code == "InvalidRequest" and _HIDDEN_WORDS in _words(error)):
            return KeyMissing(f"no object that anybody can read at {key} in {self.uri}: {_words(error)} ({code})")
        if isinstance(error, _UNANSWERED):
            environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
            endpoint = self._settings.endpoint or environment
            cause = getattr(error, "kwargs", {}).get("error") or _words(error)  # botocore wraps the socket's own words
            return StoreError(
                f"{what} failed: no sound answer from {endpoint} ({type(error).__name__}: {cause}): "
                f"{self._settings.network_remedy}"
            )
        return StoreError(f"{what} failed: {self._cause(error)}: check the store's log")


def _words(error: Exception) -> str:
    """The server's own words where there are any."""
    response = getattr(error, "response", None)
    said = response.get("Error", {}).get("Message") if isinstance(response, dict) else None
    return said or getattr(error, "strerror", None) or str(error) or "timed out"


def _answer(error: BaseException) -> tuple[int, str]:
    """HTTP status and S3 error code behind a failure; (0, '') when no server answered."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return 0, ""
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(response.get("Error", {}).get("Code", ""))


def _has_lost(error: Exception) -> bool:
    """True when a create failed because something stands at the key, or is being written there (409)."""
    return _answer(error)[0] in (409, 412)
