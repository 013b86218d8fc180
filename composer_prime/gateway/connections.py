"""The gateway's connections: how long each may take, and how many strangers may hold, so that members always get in.

A stranger is a connection that has brought no request of an admitted site yet. Where there are too many connections
the one that has waited longest ends: strangers' first, and never one whose request is worked on.
"""

import asyncio
import ipaddress
import math
import resource
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

KEEP_ALIVE_S = 75.0
"""Longer than a site's pauses between two looks, so that it needn't connect anew."""
HEAD_S = 10.0
"""For a request's head, from the connection's beginning or from the head's first byte; and for a TLS handshake."""
REST_S = 30.0
"""For what is left of a body that was answered before its end."""
ANSWER_BYTES_PER_S = 32 * 2**10
"""The slowest at which a member may read what is left of an answer when its connection ends."""
STRANGERS = 32
"""Strangers of one address (of an IPv6 /64) at once, where clients come by their own addresses."""
ACCEPTED = 16
"""Connections accepted in one turn of the event loop."""
UNSEEN = 4 * ACCEPTED
"""Descriptors of connections between accept() and close() that `Crowd` doesn't count: asyncio makes a connection known
two turns after it was accepted, and closes one that ends a turn later."""
QUEUED = 1024
"""Connections that wait to be accepted."""
OWN_FILES = 96
"""Descriptors that aren't clients': the bucket's connections, one a thread, and files."""
FEW_FILES, ENOUGH_FILES = 1024, 65536
"""Below the first a person is told; up to the second the limit is raised."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Seconds and numbers. strangers: of one address, None for any. connections: of everybody's, all kinds."""

    connections: int
    strangers: int | None = STRANGERS
    head_s: float = HEAD_S
    rest_s: float = REST_S
    keep_alive_s: float = KEEP_ALIVE_S


def connections_for_files(say: Callable[[str], None]) -> int:
    """How many connections there are descriptors for, once their limit is as high as this process may set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    num_files = max(highest, soft)
    connections = max(num_files - OWN_FILES - UNSEEN, 16)
    if num_files < FEW_FILES:
        say(f"open files are limited to {num_files}: at most {connections} connections; start after `ulimit -n 4096`")
    return connections


@dataclass
class Crowd:
    """The connections of one gateway that wait for their client, those that wait longest first."""

    limits: ConnectionLimits
    is_open: set["GuardedProtocol"] = field(default_factory=set)
    strangers: dict["GuardedProtocol", None] = field(default_factory=dict)
    num_strangers: Counter[str] = field(default_factory=Counter)
    """By address."""
    members: dict["GuardedProtocol", None] = field(default_factory=dict)

    def wait(self, connection: "GuardedProtocol") -> None:
        """It waits for its client from now on; others end where there are too many."""
        among = self.members if connection.is_member else self.strangers
        if connection in among:
            return
        among[connection] = None
        if among is self.strangers:
            self.num_strangers[connection.address] += 1
            if self.num_strangers[connection.address] > (self.limits.strangers or math.inf):
                next(each for each in self.strangers if each.address == connection.address).end()
        if len(self.is_open) > self.limits.connections:
            others = (each for each in chain(self.strangers, self.members) if each is not connection)
            next(others, connection).end()

    def work(self, connection: "GuardedProtocol") -> None:
        """It waits no more."""
        self.members.pop(connection, None)
        if connection in self.strangers:
            del self.strangers[connection]
            self.num_strangers[connection.address] -= 1
            if not self.num_strangers[connection.address]:
                del self.num_strangers[connection.address]


class GuardedProtocol(H11Protocol):
    """One connection. `crowd` is shared by all."""

    def __init__(self, *arguments: Any, crowd: Crowd, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._crowd = crowd
        self._limits = crowd.limits
        self._waits_for = ""
        self._timer: asyncio.TimerHandle | None = None
        self.is_member = False
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        found = transport.get_extra_info("socket")
        # asyncio does this only for sockets whose protocol is named, which `socket.create_server` doesn't do. Without
        # it the second piece of an answer waits for the client's delayed acknowledgement of the first: 40 ms.
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self.address = _network(self.client[0] if self.client else "")
        self._crowd.is_open.add(self)
        self._wait("head", self._limits.head_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._settle()

    def on_response_complete(self) -> None:
        self.is_member = self.is_member or bool(self.scope.get("state", {}).get("site"))
        super().on_response_complete()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.is_open.discard(self)
        self._stop()
        super().connection_lost(exc)

    def end(self) -> None:
        """End the connection now. What a member was sent still goes out, as long as that may take."""
        self._crowd.is_open.discard(self)
        self._stop()
        if self.is_member:
            left_s = self._limits.rest_s + self.transport.get_write_buffer_size() / ANSWER_BYTES_PER_S
            self.transport.close()
            self.loop.call_later(left_s, self.transport.abort)
        else:
            self.transport.abort()

    def _settle(self) -> None:
        """See what the connection waits for now."""
        if self.transport.is_closing():
            self._stop()
        elif self.cycle is not None and not self.cycle.response_complete:
            self._stop()  # the app has its own patience with bodies
        elif self.conn.their_state is not h11.IDLE:
            self._wait("rest", self._limits.rest_s)
        elif self.cycle is None or self.conn.trailing_data[0]:
            self._wait("head", self._limits.head_s)
        else:
            self._wait("request", self._limits.keep_alive_s)

    def _wait(self, what: str, within_s: float) -> None:
        """Wait for something, which has so long from when we began to wait for it."""
        if what != self._waits_for:
            self._stop()
            self._waits_for = what
            self._timer = self.loop.call_later(within_s, self.end)
            self._crowd.wait(self)

    def _stop(self) -> None:
        self._crowd.work(self)
        self._waits_for = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class GatewayServer(uvicorn.Server):
    """uvicorn with such connections. Takes sockets that listen."""

    protocol = GuardedProtocol

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._crowd = Crowd(limits)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn would, but for the connections' class and the time that a handshake has."""
        await super().startup(sockets=[])
        self.started = False
        handshake_s = self._crowd.limits.head_s if self.config.ssl else None
        for listener in sockets or []:
            server = await asyncio.get_running_loop().create_server(
                self._connection,
                sock=listener,
                ssl=self.config.ssl,
                backlog=ACCEPTED,
                ssl_handshake_timeout=handshake_s,
            )
            listener.listen(QUEUED)  # asyncio takes one number for what waits and for what is accepted at once
            self.servers.append(server)
        self.started = True

    def _connection(self) -> GuardedProtocol:
        return self.protocol(self.config, self.server_state, self.lifespan.state, crowd=self._crowd)


def _network(address: str) -> str:
    """An address as its connections are counted: whoever has one of IPv6 has its /64."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed.ipv4_mapped or parsed, 32 if parsed.ipv4_mapped else 64), strict=False))
