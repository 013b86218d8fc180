"""The requests that GatewayStore makes: signed ones to the gateway, and plain ones to the bucket by its tickets.

httpx keeps connections, honours HTTPS_PROXY and NO_PROXY, and gives up on silence; what trickles is given up here, at
the deadline. Hugging Face's S3 endpoint answers who reads by a presigned URL with a 302 to an edge near by. Only reads
are followed, and nothing that was signed goes along: the new address is good by itself.
"""

import ipaddress
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import urljoin, urlsplit

from composer_prime.errors import StoreError
from composer_prime.gateway.wire import SPAN_BYTES, Ticket, signed_headers
from composer_prime.store.remote import CONNECT_TIMEOUT_S, READ_TIMEOUT_S
from composer_prime.sync.signatures import SigningKey

CONNECTIONS = 32
"""Kept open at once, at most."""
SENT_BYTES = 2**18
"""Sent between two looks at the clock."""
MAX_ANSWER_BYTES = 4 * SPAN_BYTES
"""Of a gateway: what it lists, or an object's bytes."""
MAX_TEXT_BYTES = 4096
"""Of an error's text that is read."""
_SPOKEN = re.compile(r"<(?:Code|Message)>([^<]*)<")
MAX_WAIT_S = 10.0
"""Longest that a busy gateway's Retry-After is obeyed before the next try."""
FOUND = 302
MAX_HOPS = 3
_NAME = re.compile(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+([a-z]{2,63}|xn--[a-z0-9-]{1,59})")
_PRIVATE_ENDINGS = (
    ".local", ".localhost", ".localdomain", ".internal", ".intranet", ".private", ".corp", ".home", ".lan",
    ".home.arpa", ".test", ".invalid",
)  # fmt: skip


class Unanswered(Exception):
    """Nobody answered, or not to the end."""


class Answered(Exception):
    """An answer that isn't what was asked for."""

    def __init__(self, status: int, code: str, text: str, *, by_bucket: bool) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.by_bucket = by_bucket
        self.location = ""
        """Where a redirect leads."""


@dataclass(frozen=True)
class Place:
    """A run behind a gateway: the gateway's URL without a slash at its end, and the run's name."""

    root: str
    run: str


class GatewayClient:
    """One run behind one gateway. Raises Unanswered, Answered, and TimeoutError at the deadline. Thread-safe."""

    def __init__(self, place: Place, key: SigningKey) -> None:
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it tells every URL, and tickets are secrets
        self._place = place
        self._key = key
        self._httpx = httpx
        self._http = httpx.Client(
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS),
            headers={"accept-encoding": "identity"},
        )

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def ask(self, method: str, target: str, within_s: float, body: bytes | memoryview = b"") -> tuple[bytes, bool]:
        """(body, whether it is JSON) of the gateway's answer to a signed request.

        target   the path below the run's name and the query; ASCII that needs no escapes
        """
        headers = signed_headers(self._key, method, self._place.run, target, body)
        url = f"{self._place.root}/{self._place.run}/{target}"
        data, kind = self._send(method, url, headers, body, within_s, by_bucket=False)
        return data, kind.startswith("application/json")

    def fetch(self, ticket: Ticket, within_s: float, span: tuple[int, int] | None = None) -> bytes:
        """An object's bytes from the bucket, or those from the first to the last of `span`."""
        url, deadline = self._place_of(ticket), time.monotonic() + within_s
        span_header = {} if span is None else {"range": f"bytes={span[0]}-{span[1]}"}
        most = 2**62 if span is None else span[1] - span[0] + 1
        for hop in count():
            headers = span_header if hop else {**ticket.headers, **span_header}
            try:
                left_s = max(0.0, deadline - time.monotonic())
                return self._send("GET", url, headers, b"", left_s, by_bucket=True, most=most)[0]
            except Answered as error:
                if error.status != FOUND:
                    if hop and error.status != 416:  # what isn't the bucket's own word is no word on the object
                        raise Unanswered(f"redirected to {host_of(url)}, which answers {error.status}") from None
                    raise
                try:
                    url = next_url(url, error.location, hop)
                except Astray as why:
                    raise Answered(FOUND, "", str(why), by_bucket=True) from None
        raise AssertionError("unreachable")

    def send(self, ticket: Ticket, data: bytes | memoryview, within_s: float) -> None:
        """An object's bytes to the bucket."""
        self._send("PUT", self._place_of(ticket), dict(ticket.headers), data, within_s, by_bucket=True)

    def _place_of(self, ticket: Ticket) -> str:
        assert ticket.url is not None
        if not may_lead(self._place.root, ticket.url):
            raise StoreError(
                f"the gateway's ticket leads to {host_of(ticket.url)}, an address of one's own network: refused"
            )
        return ticket.url

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | memoryview,
        within_s: float,
        *,
        by_bucket: bool,
        most: int = MAX_ANSWER_BYTES,
    ) -> tuple[bytes, str]:
        """(body, content type) of a good answer."""
        deadline = time.monotonic() + within_s
        framed = {**headers, "content-length": str(len(body))} if method in ("PUT", "POST") else dict(headers)
        content = _pieces(body, deadline) if len(body) else None
        try:
            with self._http.stream(method, url, headers=framed, content=content) as answer:
                if not answer.is_success:
                    raise _refused(answer, by_bucket)
                pieces, read = [], 0
                for piece in answer.iter_raw():
                    _check(deadline)
                    pieces.append(piece)
                    if (read := read + len(piece)) > most:
                        raise Unanswered(f"more than the {most} bytes that were asked for")
                return b"".join(pieces), answer.headers.get("content-type", "")
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise Unanswered(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None


def _refused(answer: Any, by_bucket: bool) -> Answered:
    text, code = next(answer.iter_bytes(MAX_TEXT_BYTES), b"").decode(errors="replace"), ""
    if by_bucket:  # S3's errors are XML
        text = ": ".join(_SPOKEN.findall(text)) or " ".join(text.split())[:200]
    else:
        text, code = _said(text)
    if answer.status_code in (429, 503):
        # Waited here, so that whoever tries again does so at the time the gateway named, and a little later at random.
        time.sleep(_wait_s(answer.headers.get("retry-after", "")))
    refused = Answered(answer.status_code, code, text, by_bucket=by_bucket)
    refused.location = answer.headers.get("location", "")
    return refused


def _wait_s(retry_after: str) -> float:
    return min(float(retry_after), MAX_WAIT_S) if retry_after.isdigit() else 0.0


def _said(text: str) -> tuple[str, str]:
    """(text, code) of a gateway's refusal; a proxy's own page has no code."""
    try:
        said = json.loads(text)
        return str(said["error"]), str(said.get("code", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(text.split())[:200], ""


def _pieces(data: bytes | memoryview, deadline: float) -> Iterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), SENT_BYTES):
        _check(deadline)
        yield bytes(view[start : start + SENT_BYTES])


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the transfer is slower than the slowest that is waited for")


class Astray(Exception):
    """A redirect that isn't followed, and why."""


def next_url(url: str, location: str, hop: int) -> str:
    """Where the answer to `url` leads, which stood after `hop` others. Raises Astray; its text holds no address."""
    if not location:
        raise Astray("a redirect without an address")
    if hop >= MAX_HOPS:
        raise Astray(f"more than {MAX_HOPS} redirects")
    target = urljoin(url, location)
    if urlsplit(target).scheme not in ("https", urlsplit(url).scheme):
        raise Astray("a redirect from https to something else")
    if not may_lead(url, target):
        raise Astray("a redirect from the internet to an address of one's own network")
    return target


def may_lead(url: str, target: str) -> bool:
    """Whether who asks at `url` may be sent to `target`: from the internet to no machine or network of one's own."""
    return is_public(urlsplit(target).hostname or "") or not is_public(urlsplit(url).hostname or "")


def is_public(host: str) -> bool:
    """Whether a host is a name of the internet, or an IPv4 address of it in four plain numbers."""
    host = host.lower()
    try:
        return ipaddress.IPv4Address(host).is_global and not ipaddress.IPv4Address(host).is_multicast
    except ValueError:
        return bool(_NAME.fullmatch(host)) and not host.endswith(_PRIVATE_ENDINGS)


def host_of(url: str) -> str:
    """What may be said of an address: its query may hold a signature."""
    return urlsplit(url).netloc.rpartition("@")[2]
