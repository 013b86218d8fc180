"""A store in a bucket that speaks S3 (AWS, SeaweedFS, Ceph, ...), through s3fs.

The one atomic act is a single-part PUT with `If-None-Match: *`. Endpoint, region and credentials come from where the
AWS tools take them. Failures that pass (5xx, lost connections) are retried here, and only here, for a bounded time.
"""

import logging
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from botocore import exceptions as botocore
from fsspec import asyn
from s3fs import S3FileSystem
from s3fs.core import S3_RETRYABLE_ERRORS

from composer_prime.errors import ConfigError, KeyMissing, StoreError, StoreUnusable
from composer_prime.store.base import MAX_CREATE_BYTES, check_create, check_key, check_prefix, check_range, is_key

log = logging.getLogger(__name__)
T = TypeVar("T")
Client = Any  # S3FileSystem; its synchronous methods are made by wrappers that lose their types

CONNECT_TIMEOUT_S = 3
READ_TIMEOUT_S = 20
"""Silence after which a request counts as lost; not a limit on how long a transfer takes."""
FIRST_CONTACT_S = 5
"""For how long a store that has never answered is tried again: a person waits for the error."""
FIRST_ANSWER_S = 8
"""How long such a store may take over one try, name look-up and credentials included."""
RETRY_S = 30
"""For how long, after its first failure, an operation on a store that has answered before is tried again."""
MAX_PAUSE_S = 4
PART_BYTES = 16 * 2**20
"""`put` goes in parts of this size from twice this size on; ten at a time, each tried twice."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}")
_CREDENTIALS_MISSING = (
    botocore.NoCredentialsError,
    botocore.PartialCredentialsError,
    botocore.CredentialRetrievalError,
    botocore.NoAuthTokenError,
    botocore.TokenRetrievalError,
    botocore.ProfileNotFound,
)
_ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}


class _Vanished(Exception):
    """What beat our create is not there when we read it back: still being written, or deleted. Worth another try."""


_UNANSWERED = (*S3_RETRYABLE_ERRORS, botocore.ConnectionError, ConnectionError, TimeoutError, _Vanished)
_FAILURES = (*_UNANSWERED, botocore.BotoCoreError, botocore.ClientError, OSError)


class S3Store:
    """Store over a bucket; see `composer_prime.store.base.Store` for what the methods promise.

    The first use asks the bucket for one name, so that a wrong endpoint, bucket or key is StoreUnusable within 10 s;
    a store that fails after it has answered is StoreError, after RETRY_S of trying. Usable after a fork.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        """Use the objects of `bucket` under `prefix` ('' or segments as in keys, without outer slashes). No I/O.

        ConfigError for a name no bucket or key can have.
        """
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(
                f"store bucket ({bucket!r}) must be 3 to 63 letters, digits, '.', '_' or '-': write s3://bucket/prefix"
            )
        if prefix and not is_key(prefix):
            raise ConfigError(
                f"store prefix ({prefix!r}) must be segments of ASCII letters, digits, '_', '.', '-' joined by '/': "
                "write s3://bucket/prefix"
            )
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._folder = f"{prefix}/" if prefix else ""
        self._clients: dict[int, Client] = {}  # by process: a client's event loop does not survive a fork
        self._reached = False

    def create(self, key: str, data: bytes) -> bool:
        check_create(key, data)
        path = self._path(key)

        def attempt(client: Client) -> bool:
            try:
                client.pipe_file(path, data, mode="create", chunksize=MAX_CREATE_BYTES)  # so never in parts
                return True
            except _FAILURES as error:
                if not _has_lost(error):
                    raise
            try:
                return client.cat_file(path, max_concurrency=1) == data
            except FileNotFoundError as error:
                raise _Vanished from error

        return self._run("create", key, attempt)

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        self._run("put", key, lambda client: client.pipe_file(self._path(key), data, chunksize=PART_BYTES))

    def get(self, key: str) -> bytes:
        check_key(key)
        # One request, never parallel ranges: those could be of two different objects, when a put comes between.
        return self._run("get", key, lambda client: client.cat_file(self._path(key), max_concurrency=1))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)

        def attempt(client: Client) -> bytes:
            try:  # at least one byte, since HTTP can't ask for none and a missing object must still be noticed
                return client.cat_file(self._path(key), start=start, end=start + max(length, 1))[:length]
            except OSError as error:
                if _answer(error)[0] == 416:
                    return b""
                raise

        return self._run("get", key, attempt)

    def list(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        names: list[str] = []
        page: dict[str, Any] = {"IsTruncated": True}
        following: dict[str, str] = {}
        while page.get("IsTruncated"):
            page = self._run("list", prefix, lambda client, after=following: self._list_page(client, prefix, **after))
            names += [item["Key"].removeprefix(self._folder) for item in page.get("Contents", [])]
            following = {"ContinuationToken": page.get("NextContinuationToken", "")}
        return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._run("delete", key, lambda client: client.rm_file(self._path(key)))
        except KeyMissing:
            log.debug("store=%s delete of absent key=%s", self.uri, key)

    def close(self) -> None:
        client = self._clients.pop(os.getpid(), None)
        if client is not None and self._reached:
            asyn.sync(client.loop, client.s3.close)

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{self._folder}{key}"

    def _client(self) -> Client:
        pid = os.getpid()
        client = self._clients.get(pid)
        if client is None:
            client = S3FileSystem(
                use_listings_cache=False,
                skip_instance_cache=True,
                config_kwargs={
                    "connect_timeout": CONNECT_TIMEOUT_S,
                    "read_timeout": READ_TIMEOUT_S,
                    "retries": {"total_max_attempts": 2, "mode": "standard"},
                    "max_pool_connections": 32,
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                },
            )
            client.retries = 1
            client = self._clients.setdefault(pid, client)
        return client

    def _list_page(self, client: Client, prefix: str, **more: Any) -> dict[str, Any]:
        return client.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._folder + prefix, **more)

    def _run(self, act: str, key: str, attempt: Callable[[Client], T]) -> T:
        """The attempt's result, retried while the failure may pass; our errors instead of the client's."""
        if not self._reached:
            self._reach()
        return self._retry(act, key, attempt, give_up_at=None)

    def _reach(self) -> None:
        """Ask for one name; StoreUnusable when the bucket can't be listed, for whatever reason."""
        try:
            self._retry(
                "first contact",
                "",
                lambda client: self._list_page(client, "", MaxKeys=1, timeout=FIRST_ANSWER_S),
                give_up_at=time.monotonic() + FIRST_CONTACT_S,
            )
        except StoreError as error:
            raise StoreUnusable(str(error)) from error
        self._reached = True

    def _retry(self, act: str, key: str, attempt: Callable[[Client], T], *, give_up_at: float | None) -> T:
        longest_pause = 0.1
        while True:
            try:
                return attempt(self._client())
            except _FAILURES as error:
                pause = random.uniform(longest_pause / 2, longest_pause)
                now = time.monotonic()
                give_up_at = now + RETRY_S if give_up_at is None else give_up_at
                if not _may_pass(error) or now + pause > give_up_at:
                    raise self._translated(act, key, error) from error
                level = logging.WARNING if self._reached else logging.INFO
                log.log(level, "store=%s act=%r key=%s retry_in_s=%.2f cause=%r", self.uri, act, key, pause, error)
            time.sleep(pause)
            longest_pause = min(2 * longest_pause, MAX_PAUSE_S)

    def _translated(self, act: str, key: str, error: Exception) -> Exception:
        """Our error for the client's: what failed, why, and what to do about it."""
        status, code = _answer(error)
        what = f"{act} of {key} in {self.uri}" if key else f"{act} in {self.uri}"
        cause = getattr(error, "strerror", None) or str(error) or "timed out"
        if code == "NoSuchBucket" or (status == 404 and not key):
            return StoreUnusable(f"{what} failed: there is no bucket {self._bucket}: make it or correct the URI")
        if isinstance(error, _CREDENTIALS_MISSING) or (status in (401, 403) and code not in _ELSEWHERE):
            return StoreUnusable(
                f"{what} failed: {cause} ({code or 'no credentials'}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "(or AWS_PROFILE) to credentials that may list, read, write and delete there"
            )
        if status == 301 or code in _ELSEWHERE:
            return StoreUnusable(f"{what} failed: {cause} ({code}): set AWS_DEFAULT_REGION to the bucket's region")
        if status == 404:
            return KeyMissing(f"no object at {key} in {self.uri}")
        if isinstance(error, _UNANSWERED):
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
            cause = getattr(error, "kwargs", {}).get("error") or cause  # botocore wraps the socket's own words
            return StoreError(
                f"{what} failed: no sound answer from {endpoint} ({type(error).__name__}: {cause}): check the network "
                "and AWS_ENDPOINT_URL, then try again"
            )
        return StoreError(f"{what} failed: {cause} ({code or status or type(error).__name__}): check the store's log")


def _answer(error: BaseException) -> tuple[int, str]:
    """HTTP status and S3 error code behind a failure; (0, '') when no server answered. s3fs keeps them in the cause."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(response.get("Error", {}).get("Code", ""))
    return 0, ""


def _has_lost(error: Exception) -> bool:
    """True when a create failed because something stands at the key, or is being written there (409)."""
    return isinstance(error, FileExistsError) or _answer(error)[0] in (409, 412)


def _may_pass(error: Exception) -> bool:
    """True when the same request may succeed a moment later."""
    status, code = _answer(error)
    if not status:
        return isinstance(error, _UNANSWERED)
    return status in (408, 409, 425, 429) or (status >= 500 and status != 501) or code == "SlowDown"
