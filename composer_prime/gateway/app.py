"""The gateway over HTTP: who asks, how often, for what; then the answer, and a line in the audit log.

Paths are compared as they were sent: keys need no escapes, so whatever has any is refused before it means something.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import parse_qsl

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from composer_prime.errors import KeyMissing, ProtocolError, StoreError, StoreUnusable
from composer_prime.gateway.audit import Audit, Entry
from composer_prime.gateway.identity import Identities, Signed
from composer_prime.gateway.limits import Limits
from composer_prime.gateway.operations import Answer, Operations
from composer_prime.gateway.refusal import Refusal, busy, malformed, too_large, unknown
from composer_prime.store import gateway_wire as wire

T = TypeVar("T")
log = logging.getLogger(__name__)

AT_ONCE, UNDER_WAY = 64, 512
"""Requests that are worked on at once, and those that wait for that among them; more are told to come again."""
SITE_UNDER_WAY = 32
"""Of one site's requests, those under way at once: half of what is worked on, twice what a site moves at a time."""
BODY_PATIENCE_S, BODY_BYTES_PER_S = 30.0, 32 * 2**10
"""How long a body may take: so long, and as long as it takes at this rate."""
GONE = 499
"""The status in the audit log of a request whose sender hung up."""
MAX_ORDER_BYTES = 1024
"""Of a request for a ticket."""
METHODS = ["GET", "PUT", "POST", "DELETE", "PATCH"]


class Gateway:
    """One gateway for one run."""

    def __init__(self, run: str, identities: Identities, limits: Limits, operations: Operations, audit: Audit) -> None:
        self._run = run
        self._identities = identities
        self._limits = limits
        self._operations = operations
        self._audit = audit
        self._threads = anyio.CapacityLimiter(AT_ONCE)
        self._num_under_way = 0
        self._num_of_site: Counter[str] = Counter()

    def app(self) -> Starlette:
        """Two routes: whether it lives, and everything else."""
        return Starlette(routes=[Route("/health", self._health), Route("/{path:path}", self._any, methods=METHODS)])

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "run": self._run})

    async def _any(self, request: Request) -> Response:
        entry = Entry(secrets.token_hex(8), operation=request.method)
        self._num_under_way += 1
        try:
            answer = await self._answer(request, entry)
            entry.status = answer.status_code
        finally:  # also of a request at which the gateway itself failed
            self._num_under_way -= 1
            is_logged = self._log(entry)
        if not is_logged:  # what isn't written down isn't confirmed to anybody
            answer = _refused(503, "failed", "the gateway can't write its audit log: ask the run's owner", 30)
        answer.headers["x-request-id"] = entry.request
        return answer

    def _log(self, entry: Entry) -> bool:
        try:
            self._audit.write(entry)
        except OSError as error:
            log.error("audit_failed error=%s", error)
            return False
        return True

    async def _answer(self, request: Request, entry: Entry) -> Response:
        try:
            done = await self._do(request, entry)
        except Refusal as refusal:
            entry.verdict, entry.why = "refused", str(refusal)
            return _refused(refusal.status, refusal.code, str(refusal), refusal.retry_after_s)
        except KeyMissing as error:
            entry.verdict = "missing"
            return _refused(404, wire.MISSING, str(error))
        except ClientDisconnect:
            entry.why = "the sender hung up before the end of its request"
            return Response(status_code=GONE)
        except asyncio.CancelledError:  # only uvicorn cancels, when it has waited long enough for us to end
            entry.why = "the gateway ended before its answer was complete"
            return _refused(503, "closing", "the gateway ends: ask again, where another one or the next may answer", 1)
        except (StoreError, StoreUnusable, ProtocolError) as error:
            log.warning("request=%s bucket_failed error=%s", entry.request, error)
            entry.verdict, entry.why = "failed", str(error)
            return _refused(502, "bucket", f"the bucket behind the gateway failed: {type(error).__name__}", 1)
        entry.verdict = "allowed"
        if isinstance(done, dict):
            return JSONResponse(done, headers={"cache-control": "no-store"})
        return Response(done, media_type="application/octet-stream", headers={"cache-control": "no-store"})

    async def _do(self, request: Request, entry: Entry) -> Answer:
        """One request from its sender's name to its answer."""
        target = self._target(request)
        kind, key, query = _parse(target)
        entry.key = key or query.get("prefix", "")
        entry.operation = query.get("operation", entry.operation) if request.method == "PUT" else entry.operation
        if self._num_under_way > UNDER_WAY:
            raise busy("the gateway is busy with others", 1)
        signed = Signed(request.method, target, request.headers)
        site = await self._in_thread(lambda: self._identities.site_of(signed, lambda site: self._charge(site, entry)))
        request.state.site = site  # read by the connection that it came by
        if self._num_of_site[site] >= SITE_UNDER_WAY:
            raise busy(f"site {site} has {SITE_UNDER_WAY} requests under way", 1)
        self._num_of_site[site] += 1
        try:
            if request.method == "PUT" and kind == wire.OBJECTS:
                named, nbytes = query.get("operation", ""), _stated_bytes(request)
                await self._in_thread(lambda: self._operations.check_write(site, named, key, nbytes))
            body = await self._body(request)
            entry.nbytes = len(body)
            return await self._in_thread(lambda: self._act(site, request.method, kind, key, query, body, entry))
        finally:
            self._num_of_site[site] -= 1

    def _charge(self, site: str, entry: Entry) -> None:
        """Count a request of a site that is known now. Raises Refusal when it makes too many."""
        entry.site = site
        if wait_s := self._limits.request(site):
            raise busy(f"site {site} asks oftener than this gateway answers", wait_s)

    def _target(self, request: Request) -> str:
        """What follows the run's name, as it was sent."""
        raw = request.scope.get("raw_path") or request.scope["path"].encode()
        path, query = raw.partition(b"?")[0], request.scope["query_string"]
        if b"%" in path + query or not (path + query).isascii():
            raise malformed("no path to a run's objects needs %-escapes: spell keys as composer_prime.store.keys does")
        run, _, target = path.decode().removeprefix("/").partition("/")
        if run != self._run:
            raise Refusal(404, "run", f"this gateway serves run {self._run}, not {run[:64]!r}: correct the store's URI")
        return target + (f"?{query.decode()}" if query else "")

    async def _body(self, request: Request) -> bytes:
        """The body, which is the one that was signed for. It is read only once its sender is known."""
        at_most = MAX_ORDER_BYTES if request.method == "POST" else self._operations.max_body_bytes
        stated = _stated_bytes(request) if "content-length" in request.headers else None
        if stated is not None and stated > at_most:
            raise too_large(f"the request brings {stated} bytes, at most {at_most} are taken")
        patience_s = BODY_PATIENCE_S + (at_most if stated is None else stated) / BODY_BYTES_PER_S
        pieces, size = [], 0
        with anyio.move_on_after(patience_s) as waiting:
            async for piece in request.stream():
                pieces.append(piece)
                size += len(piece)
                if size > at_most:
                    raise too_large(f"the request brings more than {at_most} bytes")
        if waiting.cancelled_caught:
            raise Refusal(408, "slow", f"the request's body has not come within {patience_s:.0f} s")
        body = b"".join(pieces)
        if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), request.headers[wire.BODY_HEADER]):
            raise unknown("the request's body isn't the one that was signed")
        return body

    def _act(
        self, site: str, method: str, kind: str, key: str, query: dict[str, str], body: bytes, entry: Entry
    ) -> Answer:
        match method, kind:
            case "GET", wire.SITE:
                return {"site": site, "run": self._run}
            case "GET", wire.KEYS:
                return self._operations.list(site, query.get("prefix", ""))
            case "GET", wire.OBJECTS:
                return self._operations.read(key, _span(query), entry)
            case "PUT", wire.OBJECTS:
                return self._operations.write(site, query.get("operation", ""), key, body)
            case "DELETE", wire.OBJECTS:
                return self._operations.delete(site, key)
            case "POST", wire.TICKETS:
                return self._operations.ticket(site, key, body, entry)
        raise Refusal(405, "method", f"{method} of {kind[:16]!r} means nothing here")

    async def _in_thread(self, act: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(act, limiter=self._threads)


def _parse(target: str) -> tuple[str, str, dict[str, str]]:
    """(what stands behind the run's name, a key where one does, the query)."""
    path, _, query = target.partition("?")
    for kind in (wire.OBJECTS, wire.TICKETS):
        if path.startswith(kind):
            return kind, path.removeprefix(kind), dict(parse_qsl(query, keep_blank_values=True))
    return path, "", dict(parse_qsl(query, keep_blank_values=True))


def _stated_bytes(request: Request) -> int:
    stated = request.headers.get("content-length", "")
    if not (stated.isascii() and stated.isdigit() and len(stated) <= 18):
        raise Refusal(411, "length", "a request that brings an object states its length in content-length")
    return int(stated)


def _span(query: dict[str, str]) -> tuple[int, int] | None:
    if "start" not in query:
        return None
    start, length = query["start"], query.get("length", "")
    if not (start.isdigit() and length.isdigit() and max(len(start), len(length)) <= 18):
        raise malformed("start and length must be whole numbers from 0")
    return int(start), int(length)


def _refused(status: int, code: str, text: str, retry_after_s: int = 0) -> Response:
    headers = {"retry-after": str(retry_after_s)} if retry_after_s else {}
    return Response(json.dumps({"error": text, "code": code}), status, headers=headers, media_type="application/json")
