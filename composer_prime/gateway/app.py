"""The gateway over HTTP: who asks, how often, for what; then the answer, and a line of JSON about it.

Paths are compared as they were sent: keys need no escapes, so whatever has any is refused before it means something.
Slow and idle connections are the business of the reverse proxy in front.
"""

import hashlib
import hmac
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import parse_qsl

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from composer_prime.errors import KeyMissing, ProtocolError, StoreError, StoreUnusable
from composer_prime.gateway import wire
from composer_prime.gateway.identity import Identities
from composer_prime.gateway.limits import Limits
from composer_prime.gateway.operations import Answer, Operations
from composer_prime.gateway.rules import Refusal
from composer_prime.visible import json_text

T = TypeVar("T")
log = logging.getLogger(__name__)

AT_ONCE = 64
"""Requests that are worked on at once; more wait."""
MAX_ORDER_BYTES = 1024
"""Of a request for a ticket."""
MAX_TEXT = 512
"""Characters of a key or a reason in a line: what a stranger sends doesn't fill the disk."""
METHODS = ["GET", "PUT", "POST", "DELETE"]


@dataclass
class Entry:
    """What the line about one request says. No signature, nonce or URL: those are secrets for as long as they last."""

    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    site: str = ""
    """'' until its signature was found good."""
    method: str = ""
    key: str = ""
    nbytes: int = 0
    """That the request brought."""
    status: int = 500
    why: str = ""


class Gateway:
    """One gateway for one run. `note` takes each line."""

    def __init__(
        self, run: str, identities: Identities, limits: Limits, operations: Operations, note: Callable[[str], object]
    ) -> None:
        self._run = run
        self._identities = identities
        self._limits = limits
        self._operations = operations
        self._note = note
        self._threads = anyio.CapacityLimiter(AT_ONCE)

    def app(self) -> Starlette:
        """Two routes: whether it lives, and everything else."""
        return Starlette(routes=[Route("/health", self._health), Route("/{path:path}", self._any, methods=METHODS)])

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "run": self._run})

    async def _any(self, request: Request) -> Response:
        entry = Entry(method=request.method)
        try:
            answer = await self._answer(request, entry)
            entry.status = answer.status_code
            return answer
        finally:  # also of a request at which the gateway itself failed
            entry.key, entry.why = entry.key[:MAX_TEXT], entry.why[:MAX_TEXT]
            self._note(json_text(asdict(entry)))

    async def _answer(self, request: Request, entry: Entry) -> Response:
        try:
            done = await self._do(request, entry)
        except Refusal as refusal:
            entry.why = str(refusal)
            return _refused(refusal)
        except KeyMissing as error:
            return _refused(Refusal(wire.MISSING, str(error)))
        except ClientDisconnect:
            entry.why = "the sender hung up before the end of its request"
            return _refused(Refusal("malformed", entry.why))
        except (StoreError, StoreUnusable, ProtocolError) as error:
            log.warning("bucket_failed method=%s key=%s error=%s", entry.method, entry.key, error)
            entry.why = str(error)
            text = f"the bucket behind the gateway failed: {type(error).__name__}"
            return _refused(Refusal("bucket", text, retry_after_s=1))
        if isinstance(done, dict):
            return JSONResponse(done, headers={"cache-control": "no-store"})
        return Response(done, media_type="application/octet-stream", headers={"cache-control": "no-store"})

    async def _do(self, request: Request, entry: Entry) -> Answer:
        """One request from its sender's name to its answer."""
        target = self._target(request)
        path, _, asked = target.partition("?")
        kind, _, key = path.partition("/")
        query = dict(parse_qsl(asked, keep_blank_values=True))
        entry.key = key or query.get("prefix", "")
        entry.site = site = await self._in_thread(lambda: self._known(request, target))
        operation = query.get("operation", "")
        body = await self._body(request)
        entry.nbytes = len(body)

        def act() -> Answer:
            match request.method, kind:
                case "GET", wire.SITE:
                    return {"site": site, "run": self._run}
                case "GET", wire.KEYS:
                    return self._operations.list(site, query.get("prefix", ""))
                case "GET", wire.OBJECTS:
                    return self._operations.read(key, _number(query, "start"), _number(query, "length"))
                case "PUT", wire.OBJECTS:
                    return self._operations.write(site, operation, key, body)
                case "DELETE", wire.OBJECTS:
                    return self._operations.delete(site, key)
                case "POST", wire.TICKETS:
                    return self._operations.ticket(site, key, body)
            raise Refusal("method", f"{request.method} of {kind[:16]!r} means nothing here")

        return await self._in_thread(act)

    def _target(self, request: Request) -> str:
        """What follows the run's name, as it was sent."""
        raw = request.scope.get("raw_path") or request.scope["path"].encode()
        path, query = raw.partition(b"?")[0], request.scope["query_string"]
        if b"%" in path + query or not (path + query).isascii():
            raise Refusal("malformed", "no key needs %-escapes: spell keys as composer_prime.store.keys does")
        run, _, target = path.decode().removeprefix("/").partition("/")
        if run != self._run:
            raise Refusal("run", f"this gateway serves run {self._run}, not {run[:64]!r}: correct the store's URI")
        return target + (f"?{query.decode()}" if query else "")

    def _known(self, request: Request, target: str) -> str:
        """The site that asks. Nothing is remembered of one that asks too often."""
        site = self._identities.site_of(request.method, target, request.headers)
        if wait_s := self._limits.request(site):
            raise Refusal("busy", f"site {site} asks oftener than this gateway answers", retry_after_s=wait_s)
        if request.method != "GET":
            self._identities.check_once(request.headers[wire.SIGNATURE_HEADER])
        return site

    async def _body(self, request: Request) -> bytes:
        """The body, which is the one that was signed for. It is read only once its sender is known."""
        stated = _stated_bytes(request) if request.method in ("PUT", "POST") else 0
        at_most = MAX_ORDER_BYTES if request.method == "POST" else self._operations.max_body_bytes
        if stated > at_most:
            raise Refusal("large", f"the request brings {stated} bytes, at most {at_most} are taken")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > stated:
                raise Refusal("malformed", "the request brings more than its content-length")
        if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), request.headers[wire.BODY_HEADER]):
            raise Refusal("unknown", "the request's body isn't the one that was signed")
        return bytes(body)

    async def _in_thread(self, act: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(act, limiter=self._threads)


def _stated_bytes(request: Request) -> int:
    stated = request.headers.get("content-length", "")
    if not (stated.isascii() and stated.isdigit() and len(stated) <= 18):
        raise Refusal("length", "a request that brings an object states its length in content-length")
    return int(stated)


def _number(query: dict[str, str], name: str) -> int:
    value = query.get(name, "")
    if not (value.isdigit() and len(value) <= 18):
        raise Refusal("malformed", f"{name} ({value[:18]!r}) must be a whole number from 0")
    return int(value)


def _refused(refusal: Refusal) -> Response:
    headers = {"retry-after": str(refusal.retry_after_s)} if refusal.retry_after_s else {}
    said = json.dumps({"error": str(refusal), "code": refusal.code})
    return Response(said, refusal.status, headers=headers, media_type="application/json")
