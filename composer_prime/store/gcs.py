"""A store in a Google Cloud Storage bucket, through gcsfs: its credentials and its session, with requests of our own.

The one atomic act is an insert with `ifGenerationMatch=0`. gcsfs's `pipe_file` marks the end of the bytes with a fixed
string, so bytes that hold this string arrive torn; and its retries know no deadline. Both are done here instead.
"""

import io
import json
import os
import re
import secrets
from base64 import b64encode
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from fsspec import asyn
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError, NonRetryableError
from google.auth.exceptions import GoogleAuthError
from requests.exceptions import RequestException

from composer_prime.errors import ConfigError, KeyMissing, StoreError, StoreUnusable
from composer_prime.store.base import check_create, check_key, check_prefix, check_range, is_key
from composer_prime.store.remote import (
    CONNECT_TIMEOUT_S,
    READ_TIMEOUT_S,
    Client,
    RemoteStore,
    Verdict,
    check_prefix_in_uri,
    is_anonymous,
)

EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
"""Google's own environment variable: an emulator's URL; no credentials are sent there."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{2,221}")


class _Refusal(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Vanished(Exception):
    """What beat our create is not there when we read it back: still being written, or deleted. Worth another try."""


_UNAUTHORIZED = (GoogleAuthError, NonRetryableError, HttpError)
"""What gcsfs raises when it can't get or refresh credentials; every HTTP answer is a _Refusal instead."""
_UNANSWERED = (aiohttp.ClientError, RequestException, ConnectionError, TimeoutError, _Vanished)


class _OneTry(GCSFileSystem):
    """gcsfs without its own retries and without its translation of errors, which loses their status."""

    async def _request(
        self,
        method: str,
        path: str,
        *args: str,
        headers: dict[str, str] | None = None,
        json: Any = None,
        data: Any = None,
        **parameters: Any,
    ) -> tuple[int, Any, Any, bytes]:
        await self._set_session()
        session: Any = self.session
        url = self._format_path(path, args)
        async with session.request(
            method=method,
            url=url,
            params=self._get_params(parameters),
            json=json,
            headers=self._get_headers(headers),
            data=data,
            auto_decompress=parameters.get("alt") != "media",  # an object's range is of the bytes that are stored
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S),
            **_proxy(url),
        ) as answer:
            content = await answer.read()
            if answer.status >= 400:
                raise _Refusal(answer.status, _message(content))
            return answer.status, answer.headers, answer.request_info, content


def _proxy(url: str) -> dict[str, Any]:
    """The proxy that the environment names for a URL, as aiohttp's requests take it; {} for none.

    aiohttp's own look at the environment would also send the passwords of ~/.netrc, and a password that is left in the
    proxy's URL would be told in errors. aiohttp sends these headers where it opens a tunnel: to Google, always.
    """
    place = urlsplit(url)
    named = None if proxy_bypass(place.hostname or "") else getproxies().get(place.scheme)
    if not named:
        return {}
    found = urlsplit(named)
    proxy = {"proxy": found._replace(netloc=found.netloc.rpartition("@")[2]).geturl()}
    if found.username is None:
        return proxy
    who = f"{unquote(found.username)}:{unquote(found.password or '')}".encode()
    return {**proxy, "proxy_headers": {"Proxy-Authorization": f"Basic {b64encode(who).decode()}"}}


class GCSStore(RemoteStore):
    """Store over a bucket; see `composer_prime.store.base.Store` for what the methods promise."""

    _failures = (_Refusal, *_UNAUTHORIZED, *_UNANSWERED, OSError)
    _credentials_remedy = (
        "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key file of a "
        "service account that may list, read, write and delete objects there"
    )

    def __init__(self, bucket: str, prefix: str = "") -> None:
        """Use the objects of `bucket` under `prefix` ('' or segments as in keys, without outer slashes). No I/O.

        ConfigError for a name no bucket or key can have.
        """
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(
                f"store bucket ({bucket!r}) must be 3 to 222 lower-case letters, digits, '.', '_' or '-': "
                "write gs://bucket/prefix"
            )
        check_prefix_in_uri(prefix, "gs://bucket/prefix")
        super().__init__(f"gs://{bucket}/{prefix}".rstrip("/"))
        self._bucket = bucket
        self._folder = f"{prefix}/" if prefix else ""

    def create(self, key: str, data: bytes) -> bool:
        check_create(key, data)

        def attempt(client: Client, left_s: float) -> bool:
            try:
                self._insert(client, key, data, left_s)
                return True
            except _Refusal as error:
                if error.status not in (409, 412):
                    raise
            try:
                return self._read(client, key, left_s, headers={"Range": f"bytes=0-{len(data)}"}) == data
            except _Refusal as error:
                if error.status == 404:
                    raise _Vanished from error
                if error.status == 416:  # nothing stands there, in no bytes
                    return not data
                raise

        return self._run("create", key, attempt, num_bytes=2 * len(data))

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)

        def attempt(client: Client, left_s: float) -> None:
            client.call(
                "POST",
                self._upload_url(client),
                uploadType="media",
                name=self._folder + key,
                headers={"Content-Type": "application/octet-stream"},
                data=io.BytesIO(data),
                timeout=left_s,
            )

        self._run("put", key, attempt, num_bytes=len(data))

    def get(self, key: str) -> bytes:
        check_key(key)
        return self._run("get", key, lambda client, left_s: self._read(client, key, left_s), num_bytes=None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)
        last = start + max(length, 1) - 1  # HTTP can't ask for no byte, and a missing object must still be noticed

        def attempt(client: Client, left_s: float) -> bytes:
            try:
                return self._read(client, key, left_s, headers={"Range": f"bytes={start}-{last}"})[:length]
            except _Refusal as error:
                if error.status == 416:
                    return b""
                raise

        return self._run("get", key, attempt, num_bytes=length)

    def list(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        names: list[str] = []
        following: dict[str, str] | None = {}
        while following is not None:
            page = self._run(
                "list",
                prefix,
                lambda client, left_s, after=following: self._list_page(client, prefix, timeout=left_s, **after),
            )
            names += [item["name"].removeprefix(self._folder) for item in page.get("items", [])]
            token = page.get("nextPageToken")
            following = {"pageToken": token} if token else None
        return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        check_key(key)

        def attempt(client: Client, left_s: float) -> None:
            try:
                client.call("DELETE", "b/{}/o/{}", self._bucket, self._folder + key, timeout=left_s)
            except _Refusal as error:
                if error.status != 404:
                    raise

        self._run("delete", key, attempt)

    def _insert(self, client: Client, key: str, data: bytes, left_s: float) -> None:
        """One request that writes the object if there is none. The condition holds for every kind of upload, but
        emulators know it for this one only: a JSON part that names the object, then the bytes."""
        boundary = secrets.token_hex(16)
        name = json.dumps({"name": self._folder + key})
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{name}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        client.call(
            "POST",
            self._upload_url(client),
            uploadType="multipart",
            ifGenerationMatch="0",
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            data=io.BytesIO(b"".join([head.encode(), data, f"\r\n--{boundary}--".encode()])),
            timeout=left_s,
        )

    def _upload_url(self, client: Client) -> str:
        return f"{client.base.replace('/storage/v1/', '/upload/storage/v1/')}b/{self._bucket}/o"

    def _read(self, client: Client, key: str, left_s: float, headers: dict[str, str] | None = None) -> bytes:
        place = (self._bucket, self._folder + key)
        return client.call("GET", "b/{}/o/{}", *place, alt="media", headers=headers, timeout=left_s)[1]

    def _list_page(self, client: Client, prefix: str, **more: Any) -> dict[str, Any]:
        return client.call(
            "GET",
            "b/{}/o",
            self._bucket,
            prefix=self._folder + prefix,
            fields="items/name,nextPageToken",
            json_out=True,
            **more,
        )

    def _connect(self) -> Client:
        token = "anon" if is_anonymous() or os.environ.get(EMULATOR_VARIABLE) else "google_default"
        return _OneTry(project="", token=token, use_listings_cache=False, skip_instance_cache=True)

    def _disconnect(self, client: Client) -> None:
        asyn.sync(client.loop, client.session.close)

    def _look(self, client: Client, left_s: float) -> object:
        return self._list_page(client, "", maxResults="1", timeout=left_s)

    def _verdict(self, error: Exception) -> Verdict:
        if isinstance(error, _Refusal):
            if error.status in (401, 403):
                return Verdict.REFUSED
            passes = error.status in (408, 409, 425, 429) or (error.status >= 500 and error.status != 501)
            return Verdict.PASSES if passes else Verdict.LASTS
        if isinstance(error, _UNAUTHORIZED):
            return Verdict.REFUSED
        return Verdict.PASSES if isinstance(error, _UNANSWERED) else Verdict.LASTS

    def _cause(self, error: Exception) -> str:
        status = error.status if isinstance(error, _Refusal) else "no credentials"
        return f"{str(error).strip() or type(error).__name__} ({status})"

    def _translated(self, what: str, key: str, error: Exception) -> Exception:
        if isinstance(error, _Refusal) and error.status == 404:
            if key and not what.startswith(("put", "create")) and "bucket does not exist" not in str(error):
                return KeyMissing(f"no object at {key} in {self.uri}")
            return StoreUnusable(f"{what} failed: there is no bucket {self._bucket}: make it or correct the URI")
        if isinstance(error, _Refusal):
            return StoreError(f"{what} failed: {self._cause(error)}: check the bucket's settings and its log")
        endpoint = os.environ.get(EMULATOR_VARIABLE) or "Google Cloud Storage"
        return StoreError(
            f"{what} failed: no sound answer from {endpoint} ({type(error).__name__}: {str(error) or 'timed out'}): "
            "check the network, then try again"
        )


def _message(content: bytes) -> str:
    """What the server says of its refusal, on one line."""
    try:
        said = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = content.decode(errors="replace")
    return " ".join(str(said).split())[:300]
