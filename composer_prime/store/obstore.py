"""A store in a bucket (S3 and what speaks it, Google's, Azure's, Hugging Face's) or in memory, through obstore.

The one atomic act is its `put(mode="create")`. Its own retries are off: ours know a deadline (remote.py). Its time
limits are fixed when one of its stores is made, so there is one for reads and one for each size of writes.

Endpoint and credentials are the environment's, as obstore reads it (`AWS_*`, `GOOGLE_*`, `AZURE_*`); boto3, where it is
installed, adds what the AWS tools keep in files: profiles, SSO, assumed roles.
"""

import json
import os
import re
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore import store as native
from obstore.exceptions import BaseError

from composer_prime.errors import INSTALL, ConfigError, StoreError
from composer_prime.store import remote
from composer_prime.store.base import check_key, is_key
from composer_prime.store.remote import Answer, RemoteStore, is_anonymous

PART_BYTES = 16 * 2**20
"""`put` goes in parts of this size, four at once, from twice this size on."""
READ_BYTES = 2**18
"""Read between two looks at the clock, at least."""
CONNECTIONS = 32
"""Kept open when idle, at most."""

HF_ENDPOINT_VARIABLE = "COMPOSER_PRIME_HF_S3_ENDPOINT"
"""Environment variable that replaces the whole endpoint, namespace included: for a mirror, or a test."""
EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
"""Google's own environment variable: an emulator's URL; no credentials are sent there."""
_CA_VARIABLES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")

_AWS_NATIVE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Where one of these is set, obstore finds the credentials without the AWS tools' files."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,221}")
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REFUSED = re.compile(r"non-2xx status code: (\d{3})[^:]*: ?(.*)", re.DOTALL)
_INNERMOST = re.compile(r'(?:message|error): "([^"]+)"|kind: (Timeout)|\b(IncompleteBody|TimedOut)\b')
_UNKNOWN_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|token (?:request|file)|POST REDACTED|External \w+ credential|service account file"
)
_SAID = re.compile(r"<(Code|Message)>([^<]*)</")


@dataclass(frozen=True)
class Place:
    """A bucket, and what differs between the services that have one."""

    scheme: str
    bucket: str
    prefix: str = ""
    base: str = ""
    """The URI without bucket and prefix."""
    endpoint: str = ""
    """'': the service's own."""
    region: str = ""
    part_bytes: int = PART_BYTES
    silence_s: float = field(default_factory=lambda: remote.READ_TIMEOUT_S)
    """After which a request counts as lost."""


class NoCredentials(Exception):
    """There are none, and why."""


class ObjectStore(RemoteStore):
    """Store over a bucket; see `composer_prime.store.base.Store` for what the methods promise."""

    _failures = (BaseError, OSError, ValueError, NoCredentials)

    def __init__(self, place: Place) -> None:
        """No I/O. ConfigError for a name no bucket or key can have."""
        shown = f"{place.base}bucket/prefix"
        if not _BUCKET.fullmatch(place.bucket) and place.scheme != "memory":
            raise ConfigError(
                f"store bucket ({place.bucket!r}) must be 3 to 222 letters, digits, '.', '_' or '-': write {shown}"
            )
        if place.prefix and not is_key(place.prefix):
            raise ConfigError(
                f"store prefix ({place.prefix!r}) must be segments of ASCII letters, digits, '_', '.', '-' joined by "
                f"'/': write {shown}"
            )
        super().__init__(f"{place.base}{place.bucket}/{place.prefix}".rstrip("/"))
        self.place = place
        self._opened: dict[int, Any] = {}
        """obstore's stores of the bucket, by what their time limits are for."""
        self._folder = f"{place.prefix}/" if place.prefix else ""
        self._credentials_remedy = _REMEDIES.get(place.scheme, "")
        self._endpoint = place.endpoint or {"gs": "Google Cloud Storage", "az": "Azure"}.get(place.scheme, "AWS")

    def presign_get(self, key: str, expires_s: int) -> str:
        """A URL that reads one object until `expires_s` seconds from now, whoever holds it."""
        name, expires = self._folder + check_key(key), timedelta(seconds=expires_s)
        return self._run("presign", key, lambda left_s: obstore.sign(self._native(), "GET", name, expires))

    def _renew(self) -> None:
        self._opened = {}

    close = _renew

    def _native(self, num_bytes: int | None = None) -> Any:
        """obstore's store for a write of so many bytes; None: for all that sends none.

        A write's time-out counts from its start, so it is as long as a slow link takes. An answer that pauses for
        `silence_s` is lost.
        """
        if _home.setdefault("pid", os.getpid()) != os.getpid():
            # obstore's threads don't come along in a fork, and it would wait for them for ever.
            raise StoreError("this process was forked from one that uses a bucket, which can't work: start it by spawn")
        if self.place.scheme == "memory":
            return _memories.setdefault(self.place.bucket, native.MemoryStore())
        opened, doublings, silence_s = self._opened, -1, self.place.silence_s
        limits = {"read_timeout": silence_s, "timeout": remote.UNKNOWN_SIZE_S}
        if num_bytes is not None:
            doublings = (num_bytes >> 20).bit_length()
            limits = {"timeout": silence_s + (2**20 << doublings) / remote.SLOWEST_BYTES_PER_S}
        if doublings not in opened:
            limits["connect_timeout"] = remote.CONNECT_TIMEOUT_S
            options: dict[str, Any] = {name: timedelta(seconds=limit_s) for name, limit_s in limits.items()}
            options["allow_http"] = self.place.endpoint.startswith("http://")
            options["pool_max_idle_per_host"] = str(CONNECTIONS)
            if bundle := next(filter(None, map(os.environ.get, _CA_VARIABLES)), None):
                options["root_certificate"] = Path(bundle).read_bytes()
            tries = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
            opened[doublings] = _opened(self.place, client_options=options, retry_config=tries)
        return opened[doublings]

    def _fetch(self, key: str, left_s: float, span: tuple[int, int] | None) -> bytes:
        deadline = time.monotonic() + left_s
        options: Any = {} if span is None else {"range": (span[0], span[1] + 1)}
        most, num_bytes, pieces = None if span is None else span[1] - span[0] + 1, 0, []
        for piece in obstore.get(self._native(), self._folder + key, options=options).stream(min_chunk_size=READ_BYTES):
            pieces.append(piece)
            num_bytes += len(piece)
            if most is not None and num_bytes > most:
                raise ConnectionError("the server sends more than it was asked for")
            if time.monotonic() > deadline:
                raise TimeoutError("the transfer is slower than the slowest that is waited for")
        return b"".join(pieces)

    def _store(self, key: str, data: bytes | memoryview, left_s: float, *, if_absent: bool) -> None:
        obstore.put(
            self._native(len(data)),
            self._folder + key,
            data,
            mode="create" if if_absent else "overwrite",
            use_multipart=not if_absent and len(data) >= 2 * self.place.part_bytes,
            chunk_size=self.place.part_bytes,
            max_concurrency=4,
        )

    def _names(self, prefix: str, left_s: float) -> list[str]:
        """obstore's prefixes are whole folders; of a folder in which few names are wanted only its own are listed."""
        folder, _, start = (self._folder + prefix).rpartition("/")
        folders, found = [folder], []
        if start:
            level = obstore.list_with_delimiter(self._native(), folder or None)
            found = list(level["objects"])
            folders = [name for name in level["common_prefixes"] if name.startswith(self._folder + prefix)]
        for each in folders:
            for page in obstore.list(self._native(), each or None, chunk_size=1000):
                found.extend(page)
        cut = len(self._folder)
        return [item["path"][cut:] for item in found if item["path"].startswith(self._folder)]

    def _remove(self, key: str, left_s: float) -> None:
        obstore.delete(self._native(), self._folder + key)

    def _answer(self, error: Exception) -> Answer:
        text, _, debug = str(error).partition("\n\nDebug source:")
        if isinstance(error, NoCredentials) or (isinstance(error, BaseError) and _UNKNOWN_CREDENTIALS.search(text)):
            return Answer(401, "no credentials", text.removeprefix("Generic S3 error: "))
        if "Wanted range starting at" in text:  # in memory
            return Answer(416, "InvalidRange", text)
        if "redirect without LOCATION" in text:
            return Answer(301, "PermanentRedirect", "the bucket is in another region")
        if refused := _REFUSED.search(text):
            said = {name: value for name, value in reversed(_SAID.findall(refused[2]))}
            words = said.get("Message") or " ".join(refused[2].split())[:200] or "no reason given"
            return Answer(int(refused[1]), said.get("Code", ""), words)
        if isinstance(error, FileNotFoundError):  # in memory
            return Answer(404, "NoSuchKey", text)
        if type(error).__name__ == "AlreadyExistsError":
            return Answer(412, "PreconditionFailed", text)
        words = text.rpartition(" - ")[2]
        inner = [next(filter(None, match.groups())) for match in _INNERMOST.finditer(debug)]
        return Answer(0, "", f"{words} ({inner[-1]})" if inner else words)


class MemoryStore(ObjectStore):
    """A store in this process's memory: the same bytes wherever its name is opened, until the process ends."""

    def __init__(self, name: str, prefix: str = "") -> None:
        """Open the bucket `name`, made when it is new. ConfigError when the name is empty."""
        if not name:
            raise ConfigError("store URI ('memory://') names no bucket: write memory://name")
        super().__init__(Place("memory", name, prefix, "memory://"))
        self._reached = True


_memories: dict[str, Any] = {}
_home: dict[str, int] = {}


def _opened(place: Place, **more: Any) -> Any:
    """obstore's store of a bucket, with credentials as the environment has them now."""
    if place.scheme == "az":
        return native.AzureStore(place.bucket, skip_signature=is_anonymous(), **more)
    if place.scheme == "gs":
        if is_anonymous() or place.endpoint:  # obstore's own skip_signature doesn't hold for writes
            key = {"gcs_base_url": place.endpoint or "https://storage.googleapis.com", "disable_oauth": True}
            nobody = {"client_email": "", "private_key": "", "private_key_id": ""}
            more["service_account_key"] = json.dumps(key | nobody)
        return native.GCSStore(place.bucket, **more)
    region = place.region or os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION") or "us-east-1"
    settings: dict[str, Any] = {"disable_bulk_delete": True, "region": region, "skip_signature": is_anonymous()}
    if place.endpoint:
        settings |= {"endpoint": place.endpoint, "aws_endpoint_url_s3": place.endpoint}
    if not is_anonymous() and (provider := _aws_files()) is not None:
        settings["credential_provider"] = provider
    return native.S3Store(place.bucket, **settings, **more)


def _aws_files() -> Any:
    """What reads credentials as the AWS tools keep them in files; None: obstore finds them by itself."""
    environ = os.environ.get
    if any(map(environ, _AWS_NATIVE)):
        return None
    files = [environ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), environ("AWS_CONFIG_FILE", "~/.aws/config")]
    if not environ("AWS_PROFILE") and not any(Path(file).expanduser().exists() for file in files):
        if environ("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise NoCredentials("Unable to locate credentials")
        return None
    try:
        from boto3.session import Session
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError as error:
        raise NoCredentials(f"the AWS profile can't be read without boto3: {INSTALL.format('aws')}") from error
    try:
        return Boto3CredentialProvider(Session())
    except (BotoCoreError, ValueError) as error:
        raise NoCredentials(str(error)) from error


def open_bucket(scheme: str, rest: str) -> ObjectStore:
    """The store at `scheme`://`rest`. No I/O. ConfigError where they name no bucket."""
    base, namespace, more, environ = f"{scheme}://", "", {}, os.environ.get
    if scheme == "hf":
        kind, namespace, rest = [*rest.split("/", 2), "", ""][:3]
        base = f"hf://buckets/{namespace}/"
        if kind != "buckets" or not _NAMESPACE.fullmatch(namespace):
            raise ConfigError(
                f"store URI (hf://{kind}/{namespace}) must name a namespace and a bucket: write "
                "hf://buckets/namespace/bucket/prefix"
            )
        # Its region is the only one that the endpoint has, whatever AWS_DEFAULT_REGION says. Parts are what such
        # endpoints keep least well; up to 2 GiB are stored before a put is answered.
        more = {"region": "us-east-1", "part_bytes": 2**30, "silence_s": 120}
    bucket, _, prefix = rest.partition("/")
    if scheme == "memory":
        return MemoryStore(bucket, prefix.strip("/"))
    endpoint = {
        "s3": environ("AWS_ENDPOINT_URL_S3") or environ("AWS_ENDPOINT_URL"),
        "gs": environ(EMULATOR_VARIABLE),
        "az": environ("AZURE_STORAGE_ENDPOINT"),
        "hf": environ(HF_ENDPOINT_VARIABLE) or f"https://s3.hf.co/{namespace}",
    }[scheme]
    return ObjectStore(Place(scheme, bucket, prefix.strip("/"), base, endpoint or "", **more))


_MAY = "that may list, read, write and delete there"
_REMEDIES = {
    "s3": f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) to credentials {_MAY}",
    "hf": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to S3 keys of the Hugging Face account (not a Hub token) "
    + _MAY,
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key file of a "
    f"service account {_MAY}",
    "az": f"set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or a SAS token {_MAY}",
}
