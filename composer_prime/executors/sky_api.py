"""Requests to a SkyPilot API server, with time-outs, repeats and errors that say what to do.

The server answers a POST with a request's id, and tells the result at `/api/get` once it has one. Results are JSON
strings; what stands beside them is pickled, may hold secrets, and is neither read nor shown.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.services import Busy, first_line, patiently, refusal

ENDPOINT_VARIABLE, TOKEN_VARIABLE = "SKYPILOT_API_SERVER_ENDPOINT", "SKYPILOT_SERVICE_ACCOUNT_TOKEN"
DEFAULT_ENDPOINT = "http://127.0.0.1:46580"
API_VERSION, VERSION = 62, "0.14.1"
"""The version that we speak, and the least that we take: no older server was tried."""
REQUEST_TIMEOUT_S = 30.0
RESULT_TIMEOUT_S = 300.0
SILENCE_S = 90.0
"""The server shows every 30 s that a log's stream lives."""
LAUNCH_TIMEOUT_S = 1200.0
"""A server that keeps its jobs' controller on a machine of its own starts that one first."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FIXABLE = re.compile(r"ValueError|TypeError|NotSupported|Invalid|Mismatch|NoCloudAccess|Permission|Policy")
"""SkyPilot's errors that tell of what was asked, not of the server."""
_REMEDIES = {
    **dict.fromkeys((400, 422), "SkyPilot does not take this request: correct what it names"),
    **dict.fromkeys((401, 403), f"set {TOKEN_VARIABLE} to a token that may start jobs there"),
}


class _Slow(Busy):
    """The connection stands, and nothing came in time."""


class SkyApi:
    """One API server. May be used by several threads at once.

    endpoint, token   None: what SkyPilot's own client takes from the environment
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        given = (endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT).rstrip("/")
        if not given.startswith(("http://", "https://")):
            raise BadInput(f"{ENDPOINT_VARIABLE} ({given}) must be a URL: write http://HOST:PORT")
        url, token = httpx.URL(given), token or os.environ.get(TOKEN_VARIABLE)
        self._login = {ENDPOINT_VARIABLE: given} | ({TOKEN_VARIABLE: token} if token else {})
        headers = {"X-SkyPilot-API-Version": str(API_VERSION), "X-SkyPilot-Version": VERSION}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(base_url=url, headers=headers, timeout=REQUEST_TIMEOUT_S)
        self.shown = str(url.copy_with(username=None, password=None))
        """The server's URL without the password that it may hold."""
        self._host = f" on {socket.gethostname()}" if url.host in _LOOPBACK else ""

    def login_variables(self) -> dict[str, str]:
        """The variables by which another machine reaches the server. Raises BadInput for one on loopback."""
        if self._host:
            raise BadInput(
                f"SkyPilot's API server {self.shown} is this machine's alone, so nobody elsewhere can watch its jobs: "
                f"run one that others reach, and set {ENDPOINT_VARIABLE}"
            )
        return self._login

    def check_ready(self) -> dict[str, Any]:
        """The server's word on itself. Raises BadInput when it is none of SkyPilot's, or too old to be understood."""
        answer = patiently(self.health)
        try:
            health = answer.json()
            version = int(health["api_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{self.shown} is no SkyPilot API server: set {ENDPOINT_VARIABLE} to one") from error
        if version < API_VERSION:
            raise BadInput(
                f"SkyPilot API server {self.shown} has version {health.get('version')} (API {version}), and "
                f"{VERSION} (API {API_VERSION}) is the least: pip install 'skypilot>={VERSION}' where it runs"
            )
        return health

    def health(self) -> httpx.Response:
        """The same as it was sent, by one try."""
        return self._send("GET", "/api/health")

    def account(self) -> str:
        """Whose jobs are seen, and where: a loopback address is another server on each machine."""
        user = self.check_ready().get("user") or {}
        return f"{user.get('name', '')}@{self.shown}{self._host}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The result of a request; `body` None: a GET."""
        method = "GET" if body is None else "POST"
        return self._result(patiently(lambda: self._request_id(method, path, body)), RESULT_TIMEOUT_S)

    def launch(self, body: Mapping[str, Any]) -> None:
        """Have a managed job launched by one try: when its answer is lost, there may be one."""
        self._result(self._request_id("POST", "/jobs/launch", body), LAUNCH_TIMEOUT_S)

    def log(self, job: int, *, follow: bool) -> Iterator[bytes]:
        """A managed job's log in chunks, from its start. Raises Busy when it breaks off, or is silent for too long."""
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=SILENCE_S)
        body = {"job_id": job, "follow": follow}
        with self._translated(), self._client.stream("POST", "/jobs/logs", json=body, timeout=timeout) as answer:
            if answer.status_code != 200:
                answer.read()
                raise self._refusal(answer)
            yield from answer.iter_bytes()

    def close(self) -> None:
        self._client.close()

    def _result(self, request: str, wait_s: float) -> Any:
        """A request's result. Raises BadInput or ExecutorError, as it says, and ExecutorError after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            with suppress(_Slow):  # the server keeps a request waiting that has no result yet
                return json.loads(patiently(lambda: self._answer(request)))
        raise ExecutorError(f"{self.shown} has no result of request {request} after {wait_s:g} s: see `sky api status`")

    def _answer(self, request: str) -> str:
        try:
            return self._send("GET", "/api/get", params={"request_id": request}).json()["return_value"]
        except (KeyError, TypeError, ValueError) as error:  # a page of some proxy instead of an answer
            raise Busy(f"{self.shown} gave no readable answer ({error!r})") from error

    def _request_id(self, method: str, path: str, body: Mapping[str, Any] | None) -> str:
        answer = self._send(method, path, json=body)
        if not (request := answer.headers.get("X-SkyPilot-Request-ID")):
            raise Busy(f"{self.shown}{path} gave no request's id")
        return request

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        with self._translated():
            answer = self._client.request(method, path, **more)
        if answer.status_code != 200:
            raise self._refusal(answer)
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
        except (httpx.HTTPError, httpx.StreamError) as error:
            kind = _Slow if isinstance(error, httpx.ReadTimeout) else Busy
            raise kind(f"no answer from {self.shown} ({type(error).__name__}: {error})") from error

    def _refusal(self, answer: httpx.Response) -> BadInput | ExecutorError:
        """The error that a status other than 200 stands for."""
        failure, said = _said(answer)
        if failure:
            kind = BadInput if _FIXABLE.search(failure) else ExecutorError
            return kind(f"SkyPilot ({self.shown}) refused: {said} [{failure}]")
        return refusal(f"{self.shown} answered {answer.status_code} ({said})", answer.status_code, _REMEDIES)


def _said(answer: httpx.Response) -> tuple[str, str]:
    """SkyPilot's type of error, "" where it isn't its own, and what it said: one line, and nothing of what it was sent,
    since requests hold secrets."""
    try:
        told = answer.json()
    except ValueError:
        return "", answer.reason_phrase
    detail = told.get("detail", told) if isinstance(told, dict) else told
    if isinstance(detail, list):  # what could not be parsed; beside `msg` stands the whole request
        return "", "; ".join(f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in detail)
    if not isinstance(detail, dict):
        return "", first_line(str(detail))
    if str(detail.get("error", "")).startswith("{"):
        error = json.loads(detail["error"])
        return str(error.get("type")), first_line(str(error.get("message")))
    return "", first_line(str(detail.get("message") or answer.reason_phrase))
