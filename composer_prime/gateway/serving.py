"""Starts a gateway: the run, its rules and limits put together, behind uvicorn, at an address where that is safe.

TLS is a reverse proxy's business, or uvicorn's own with certificate files: presigned URLs travel in the answers.
"""

import asyncio
import ipaddress
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import uvicorn
from starlette.applications import Starlette

from composer_prime.errors import BadInput
from composer_prime.gateway.app import Gateway
from composer_prime.gateway.audit import Audit
from composer_prime.gateway.connections import (
    KEEP_ALIVE_S,
    QUEUED,
    STRANGERS,
    ConnectionLimits,
    GatewayServer,
    connections_for_files,
)
from composer_prime.gateway.identity import Identities
from composer_prime.gateway.limits import Limits, Rates
from composer_prime.gateway.operations import Operations
from composer_prime.gateway.rules import MemberRules, Rules
from composer_prime.gateway.served import Served, serve_run
from composer_prime.gateway.tickets import tickets_of
from composer_prime.store import open_store

GRACE_S = 5


@dataclass(frozen=True)
class Listening:
    """Where a gateway listens. behind_tls: a reverse proxy on this machine or network speaks TLS to the outside."""

    host: str
    port: int
    behind_tls: bool = False
    certfile: Path | None = None
    keyfile: Path | None = None


def gateway_app(served: Served, audit: Audit, rates: Rates, rules: Rules | None = None) -> Starlette:
    """The app of one run's gateway. `rules` None: those for members."""
    limits = Limits(rates)
    operations = Operations(
        served.store,
        rules or MemberRules(served.store, served.facts, served.roster),
        limits,
        tickets_of(served.store),
        served.facts.max_object_bytes,
    )
    run = served.facts.run
    return Gateway(run, Identities(served.roster, run), limits, operations, audit).app()


def serve(
    uri: str,
    at: Listening,
    *,
    audit: Path | None,
    rates: Rates,
    max_object_bytes: int,
    say: Callable[[str], None],
    allowed: Collection[str] = (),
) -> None:
    """Serve the run at `uri` until SIGINT or SIGTERM. `audit` None: the audit log goes to standard output. `allowed` as
    for `serve_run`.

    Raises BadInput for what a person can fix: no run there, one without keys or one that a guest could ruin, an address
    that isn't safe or not free.
    """
    check_address(at)
    with closing(open_store(uri)) as store, _opened(audit) as stream, closing(bound(at)) as listener:
        served = serve_run(store, max_object_bytes, allowed)
        app = gateway_app(served, Audit(stream), rates)
        scheme, port = "https" if at.certfile else "http", listener.getsockname()[1]
        say(f"gateway for run {served.facts.run}: listening at {scheme}://{at.host}:{port}")
        run = served.facts.run
        say(f"sites use gateway+https://YOUR-HOST/{run} (here: gateway+{scheme}://{at.host}:{port}/{run})")
        invite = f"composer-prime invite {uri} --name NAME --recipe RECIPE --key OWNER.KEY"
        say(f"{invite} --gateway gateway+https://YOUR-HOST/{run}")
        limits = ConnectionLimits(connections_for_files(say), STRANGERS if faces_clients(at) else None)
        asyncio.run(server_of(app, at, limits).serve(sockets=[listener]))


def server_of(app: Starlette, at: Listening, limits: ConnectionLimits) -> GatewayServer:
    """The server of a gateway's app; `serve` takes the sockets at which it listens."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        log_config=None,  # its lines are spelled as our own are
        access_log=False,  # the audit log is ours, and holds no URLs
        server_header=False,
        lifespan="off",
        loop="asyncio",  # also where a library has brought uvloop
        ws="none",
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=at.certfile,
        ssl_keyfile=at.keyfile,
    )
    return GatewayServer(config, limits)


def faces_clients(at: Listening) -> bool:
    """Whether an address that connects is a client's own: behind a proxy, or on loopback, all come from one."""
    return not at.behind_tls and not _is_loopback(at.host)


def check_address(at: Listening) -> None:
    """Raise BadInput when others than this machine could reach the gateway without TLS."""
    if at.keyfile is not None and at.certfile is None:
        raise BadInput("--keyfile needs --certfile: give both, or let a reverse proxy speak TLS")
    for file in (at.certfile, at.keyfile):
        if file is not None and not file.is_file():
            raise BadInput(f"{file} is no file: name the certificate (--certfile) and its key (--keyfile) in PEM")
    if at.behind_tls or at.certfile is not None or _is_loopback(at.host):
        return
    raise BadInput(
        f"--host ({at.host}) is reached from outside this machine, and answers hold presigned URLs: listen on "
        "127.0.0.1 behind a reverse proxy with TLS, say --behind-tls where that proxy is another machine, or give "
        "--certfile and --keyfile"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(at: Listening) -> socket.socket:
    """A socket that listens there. Raises BadInput when the address isn't free."""
    family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
    try:
        return socket.create_server((at.host, at.port), family=family, backlog=QUEUED)
    except OSError as error:
        raise BadInput(
            f"--host {at.host} --port {at.port} can't be listened at ({error.strerror}): choose others"
        ) from error


@contextmanager
def _opened(audit: Path | None) -> Iterator[TextIO]:
    """The audit log's stream, appended to."""
    if audit is None:
        yield sys.stdout
        return
    try:
        stream = audit.open("a", encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"--audit {audit} can't be written ({error.strerror}): name a file in a folder of yours"
        ) from error
    with stream:
        yield stream
