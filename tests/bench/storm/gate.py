"""A site's way to the store, which can be cut: a small HTTP gate on loopback that passes bytes on, unchanged.

It reads the heads of requests, no more, to know when a payload is under way and to answer in the store's place. The
Host header stays the site's, as its signature demands.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from composer_prime.store import keys

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
REFUSAL = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
    % (len(SLOW_DOWN), SLOW_DOWN)
)
HEAD_END = b"\r\n\r\n"


@dataclass
class Weather:
    """What a gate does to what passes. Read by the gates' thread, set by another.

    busy_share   of the requests that are answered 503 SlowDown
    delay_s      before each request is passed on
    silent       nothing passes, in either direction, and nobody is told
    hold_upload  the next payload stops half-way, and everything else of its connection with it
    held         a payload is held so now
    requests     all requests so far
    """

    busy_share: float = 0.0
    delay_s: float = 0.0
    silent: bool = False
    hold_upload: bool = False
    held: bool = False
    requests: int = 0


class Gates:
    """A thread that runs the gates of all sites."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="storm-gates", daemon=True)
        self._thread.start()

    def open(self, store_port: int, root: str, seed: int) -> "Gate":
        """A new gate before the store.

        root   bucket and run, as in a path: /storm/run/; what payloads are named below it
        """
        gate = Gate(self, store_port, root, seed)
        gate.restore()
        return gate

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do it on the gates' thread and wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def soon(self, call: Callable[[], object]) -> None:
        """Do it on the gates' thread."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Stop the thread; connections break."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()


class Gate:
    """One site's gate; `port` stays the same however often it is cut."""

    def __init__(self, gates: Gates, store_port: int, root: str, seed: int) -> None:
        self._gates = gates
        self.store_port = store_port
        self.root = root
        self.port = 0
        self.weather = Weather()
        self.chance = random.Random(seed)
        self.connections: set[_Site] = set()
        self._server: asyncio.Server | None = None

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        self._gates.run(self._close())

    def restore(self) -> None:
        """Let everything pass again."""
        self.weather = Weather(requests=self.weather.requests)
        if self._server is None:
            self._gates.run(self._open())
        self._gates.soon(self._pump)

    def drop_connections(self) -> None:
        """Break what is open, as when the process at the other end is gone."""
        self._gates.soon(self._abort)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Site(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._abort()

    def _abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    def _pump(self) -> None:
        for connection in list(self.connections):
            connection.pump()


class _Site(asyncio.Protocol):
    """A connection from the site, and through `_Store` on to the store."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._transport: asyncio.Transport | None = None
        self._store: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unsent = bytearray()
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._body_left = 0
        self._hold_at = -1
        self._refused = False
        self._admit_at: float | None = None

    # --- what the event loop calls ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._gate.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._inbox += data
        self.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.connections.discard(self)
        if self._store is not None:
            self._store.close()

    def answered(self, data: bytes) -> None:
        """The store sent bytes."""
        self._outbox += data
        self.pump()

    def store_gone(self) -> None:
        """The store closed its end."""
        self._store = None
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Break both ends at once."""
        for transport in (self._transport, self._store):
            if transport is not None:
                transport.abort()

    # --- passing on -------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Pass on what may pass now."""
        if self._gate.weather.silent or self._transport is None or self._transport.is_closing():
            return
        if self._outbox:
            self._transport.write(bytes(self._outbox))
            self._outbox.clear()
        if self._refused:
            self._inbox.clear()
        while self._inbox and self._pass_some():
            pass

    def _pass_some(self) -> bool:
        """Pass one head, or a piece of a body; False when nothing may pass now."""
        if self._body_left == 0:
            return self._pass_head()
        count = min(len(self._inbox), self._body_left)
        if self._hold_at >= 0:
            if not self._gate.weather.held:
                self._hold_at = -1  # let go
            else:
                count = min(count, self._body_left - self._hold_at)
                if count <= 0:
                    return False
        self._send(count)
        self._body_left -= count
        return True

    def _pass_head(self) -> bool:
        end = self._inbox.find(HEAD_END)
        if end < 0 or not self._is_admitted():
            return False
        weather = self._gate.weather
        head = bytes(self._inbox[: end + len(HEAD_END)])
        method, path = head.split(b" ", 2)[:2]
        weather.requests += 1
        if self._gate.chance.random() < weather.busy_share:
            self._refuse()
            return False
        self._body_left = _content_length(head)
        key = path.decode("ascii", "replace").removeprefix(self._gate.root).partition("?")[0]
        if weather.hold_upload and method == b"PUT" and keys.is_payload(key):
            weather.hold_upload, weather.held = False, True
            self._hold_at = self._body_left // 2
        self._send(len(head))
        return True

    def _is_admitted(self) -> bool:
        """Whether the next request has waited as long as it must."""
        loop = asyncio.get_running_loop()
        delay_s = self._gate.weather.delay_s
        if self._admit_at is None and delay_s > 0:
            self._admit_at = loop.time() + delay_s
            loop.call_later(delay_s, self.pump)
        if self._admit_at is not None and loop.time() < self._admit_at - 0.001:
            return False
        self._admit_at = None
        return True

    def _send(self, count: int) -> None:
        data = bytes(self._inbox[:count])
        del self._inbox[:count]
        if self._store is not None:
            self._store.write(data)
            return
        self._unsent += data
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(lambda: _Store(self), "127.0.0.1", self._gate.store_port)
        except OSError:
            self.abort()
            return
        self._store = transport
        transport.write(bytes(self._unsent))
        self._unsent.clear()

    def _refuse(self) -> None:
        """Answer in the store's place; whatever else the site sends here is thrown away."""
        assert self._transport is not None
        self._refused = True
        self._transport.write(REFUSAL)
        asyncio.get_running_loop().call_later(1.0, self._transport.close)


class _Store(asyncio.Protocol):
    """The connection to the store that belongs to a site's."""

    def __init__(self, site: _Site) -> None:
        self._site = site

    def data_received(self, data: bytes) -> None:
        self._site.answered(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._site.store_gone()


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0
