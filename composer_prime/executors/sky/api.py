"""Requests to a SkyPilot API server, with time-outs, repeats and errors that say what to do.

The server answers a POST with a request's id, and tells the result at `/api/get` once it has one. Results are JSON
strings; what stands beside them is pickled, may hold secrets, and is neither read nor shown.
"""

import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.repeating import Busy, patiently

log = logging.getLogger(__name__)

T = TypeVar("T")

ENDPOINT_VARIABLE, TOKEN_VARIABLE = "SKYPILOT_API_SERVER_ENDPOINT", "SKYPILOT_SERVICE_ACCOUNT_TOKEN"
DEFAULT_ENDPOINT = "http://127.0.0.1:46580"
API_VERSION, VERSION = 62, "0.14.1"
"""What we speak, and the least that we take: no older server was tried."""
REQUEST_TIMEOUT_S = 30.0
RESULT_TIMEOUT_S = 300.0
SILENCE_S = 90.0
"""The server shows every 30 s that a log's stream lives."""
LAUNCH_TIMEOUT_S = 1200.0
"""A server that keeps its jobs' controller on a machine of its own starts that one first."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FIXABLE = re.compile(r"ValueError|TypeError|NotSupported|Invalid|Mismatch|NoCloudAccess|Permission|Policy")
"""SkyPilot's errors that tell of what was asked, not of the server."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class _Slow(Busy):
    """The connection stands, and nothing came in time."""


@dataclass(frozen=True)
class Failure:
    """How the server tells that a request failed: SkyPilot's type of error, and one line."""

    type: str
    message: str

    def __str__(self) -> str:
        return f"{self.message} [{self.type}]"


class SkyApi:
    """One API server. May be used by several threads at once.

    endpoint, token   None: what SkyPilot's own client takes from the environment
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        given = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        if not given.startswith(("http://", "https://")):
            raise BadInput(f"{ENDPOINT_VARIABLE} ({given}) must be a URL: write http://HOST:PORT")
        url = httpx.URL(given.rstrip("/"))
        token = token or os.environ.get(TOKEN_VARIABLE)
        headers = {"X-SkyPilot-API-Version": str(API_VERSION), "X-SkyPilot-Version": VERSION}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(base_url=url, headers=headers, timeout=REQUEST_TIMEOUT_S)
        self.shown = str(url.copy_with(username=None, password=None))
        """The server's URL without the password that it may hold."""
        self._place = f" on {socket.gethostname()}" if url.host in _LOOPBACK else ""

    def login_variables(self) -> dict[str, str]:
        """The variables by which another machine reaches the server. Raises BadInput for one on loopback."""
        if self._place:
            raise BadInput(
                f"SkyPilot's API server {self.shown} is this machine's alone, so nobody elsewhere can watch its jobs: "
                f"run one that others reach, and set {ENDPOINT_VARIABLE}"
            )
        token = self._client.headers.get("Authorization", "").removeprefix("Bearer ")
        return {ENDPOINT_VARIABLE: str(self._client.base_url)} | ({TOKEN_VARIABLE: token} if token else {})

    def check_ready(self) -> dict[str, Any]:
        """The server's word on itself. Raises BadInput when it is none of SkyPilot's, or too old to be understood."""
        health = patiently(self.health)
        try:
            version = int(health["api_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{self.shown} is no SkyPilot API server: set {ENDPOINT_VARIABLE} to one") from error
        if version < API_VERSION:
            raise BadInput(
                f"SkyPilot API server {self.shown} has version {health.get('version')} (API {version}), and "
                f"{VERSION} (API {API_VERSION}) is the least: pip install 'skypilot>={VERSION}' where it runs"
            )
        return health

    def health(self) -> Any:
        """The same without a look at it, by one try; None: it can't be read."""
        try:
            return self._send("GET", "/api/health").json()
        except ValueError:
            return None

    def account(self) -> str:
        """Whose jobs are seen, and where: a loopback address is another server on each machine."""
        user = self.check_ready().get("user") or {}
        return f"{user.get('name', '')}@{self.shown}{self._place}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The result of a request; `body` None: a GET."""
        method = "GET" if body is None else "POST"
        return self.result(patiently(lambda: self._request_id(method, path, body)), RESULT_TIMEOUT_S)

    def launch(self, body: Mapping[str, Any], recover: Callable[[], T | None]) -> T | None:
        """Have a managed job launched; what `recover` finds of one that a lost request may have launched, else None."""
        request = patiently(lambda: self._request_id("POST", "/jobs/launch", body), recover)
        if not isinstance(request, str):
            return request
        self.result(request, LAUNCH_TIMEOUT_S)
        return None

    def result(self, request: str, wait_s: float) -> Any:
        """What a request came to. Raises BadInput or ExecutorError, as it says, and ExecutorError after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if (answer := patiently(lambda: self._result(request))) is not None:
                return json.loads(answer["return_value"])
        raise ExecutorError(f"{self.shown} has no result of request {request} after {wait_s:g} s: see `sky api status`")

    def _result(self, request: str) -> Any:
        """The server's answer, which waits for the result; None: not yet."""
        try:
            return self._send("GET", "/api/get", params={"request_id": request}).json()
        except _Slow:
            return None
        except ValueError as error:  # a page of some proxy instead of an answer
            raise Busy(f"{self.shown} gave no readable answer ({error})") from error

    @contextmanager
    def log_stream(self, job: int, *, follow: bool) -> Iterator[Iterator[bytes]]:
        """A managed job's log in chunks, from its start. Raises Busy when it breaks off, or is silent for too long."""
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=SILENCE_S)
        body = {"job_id": job, "follow": follow}
        with self._translated(), self._client.stream("POST", "/jobs/logs", json=body, timeout=timeout) as answer:
            if answer.status_code != 200:
                answer.read()
                self._refuse(answer)
            yield answer.iter_bytes()

    def close(self) -> None:
        self._client.close()

    def _request_id(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        answer = self._send(method, path, json=body)
        if not (request := answer.headers.get("X-SkyPilot-Request-ID")):
            raise Busy(f"{self.shown}{path} gave no request's id")
        return request

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        with self._translated():
            answer = self._client.request(method, path, **more)
            if answer.status_code != 200:
                self._refuse(answer)
            return answer

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the client's errors into ours."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Busy(
                f"no SkyPilot API server at {self.shown} ({error}): start one with `sky api start`, or set "
                f"{ENDPOINT_VARIABLE}"
            ) from error
        except httpx.ReadTimeout as error:
            raise _Slow(f"no answer from {self.shown}") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise Busy(f"no answer from {self.shown} ({type(error).__name__}: {error})") from error

    def _refuse(self, answer: httpx.Response) -> None:
        """Raise what a status other than 200 means."""
        status, said = answer.status_code, _said(answer)
        if isinstance(said, Failure):
            kind = BadInput if _FIXABLE.search(said.type) else ExecutorError
            raise kind(f"SkyPilot ({self.shown}) refused: {said}")
        where = f"{self.shown} answered {status} ({said})"
        if status in (401, 403):
            raise BadInput(f"{where}: set {TOKEN_VARIABLE} to a token that may start jobs there")
        if status in (408, 429) or status >= 500:
            asked = answer.headers.get("Retry-After", "")
            raise Busy(where, float(asked) if asked.isascii() and asked.isdigit() else 0.0)
        if status in (400, 422):
            raise BadInput(f"{where}: SkyPilot does not take this request: correct what it names")
        raise ExecutorError(where)


def _said(answer: httpx.Response) -> "str | Failure":
    """What the server said, in one line, and nothing of what it was sent: requests hold secrets."""
    try:
        told = answer.json()
    except ValueError:
        return answer.reason_phrase
    detail = told.get("detail", told) if isinstance(told, dict) else told
    if isinstance(detail, list):  # what could not be parsed; beside `msg` stands the whole request
        return "; ".join(f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in detail)
    if not isinstance(detail, dict):
        return first_line(str(detail))
    if str(detail.get("error", "")).startswith("{"):
        error = json.loads(detail["error"])
        return Failure(str(error.get("type")), first_line(str(error.get("message"))))
    return first_line(str(detail.get("message") or answer.reason_phrase))


def first_line(text: str) -> str:
    """The first line of SkyPilot's words that isn't empty, without colors."""
    plain = _ESCAPE.sub("", text)
    return next((line.strip().rstrip(".") for line in plain.splitlines() if line.strip()), "without a word")[:500]
