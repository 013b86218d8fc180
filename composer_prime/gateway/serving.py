"""Starts a gateway: the run, its rules and limits put together, behind uvicorn, at an address where that is safe.

It speaks plain HTTP. TLS, slow clients and floods by strangers are the business of the reverse proxy in front of it.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from contextlib import closing

import uvicorn
from starlette.applications import Starlette

from composer_prime.errors import BadInput
from composer_prime.gateway.app import Gateway
from composer_prime.gateway.identity import Identities
from composer_prime.gateway.limits import Limits, Rates
from composer_prime.gateway.operations import Operations
from composer_prime.gateway.rules import MemberRules
from composer_prime.gateway.served import Served, serve_run
from composer_prime.gateway.tickets import tickets_of
from composer_prime.store import open_store

GRACE_S = 5
KEEP_ALIVE_S = 75
"""Longer than a site's pauses between two looks, so that it needn't connect anew."""


def gateway_app(served: Served, rates: Rates, note: Callable[[str], object]) -> Starlette:
    """The app of one run's gateway."""
    limits, run = Limits(rates), served.facts.run
    rules = MemberRules(served.store, served.facts, served.roster)
    operations = Operations(served.store, rules, limits, tickets_of(served.store), served.facts.max_object_bytes)
    return Gateway(run, Identities(served.roster, run), limits, operations, note).app()


def serve(
    uri: str,
    host: str,
    port: int,
    *,
    behind_tls: bool,
    rates: Rates,
    max_object_bytes: int,
    say: Callable[[str], None],
    note: Callable[[str], object],
    allowed: Collection[str] = (),
) -> None:
    """Serve the run at `uri` until SIGINT or SIGTERM. `note` takes a line of JSON about each request; `allowed` as for
    `serve_run`.

    Raises BadInput for what a person can fix: no run there, one without keys or one that a guest could ruin, an address
    that isn't safe or not free.
    """
    check_address(host, behind_tls)
    with closing(open_store(uri)) as store, closing(bound(host, port)) as listener:
        served = serve_run(store, max_object_bytes, allowed)
        run, at = served.facts.run, f"{host}:{listener.getsockname()[1]}"
        say(f"gateway for run {run}: listening at http://{at}")
        say(f"sites use gateway+https://YOUR-HOST/{run} (here: gateway+http://{at}/{run})")
        invite = f"composer-prime invite {uri} --name NAME --recipe RECIPE --key OWNER.KEY"
        say(f"{invite} --gateway gateway+https://YOUR-HOST/{run}")
        asyncio.run(server_of(gateway_app(served, rates, note)).serve(sockets=[listener]))


def server_of(app: Starlette) -> uvicorn.Server:
    """The server of a gateway's app; `serve` takes the sockets at which it listens."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        log_config=None,  # its lines are spelled as our own are
        access_log=False,  # the gateway's own lines hold no URLs
        server_header=False,
        lifespan="off",
        loop="asyncio",  # also where a library has brought uvloop
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)


def check_address(host: str, behind_tls: bool) -> None:
    """Raise BadInput when others than this machine could reach the gateway without TLS."""
    if not behind_tls and not _is_loopback(host):
        raise BadInput(
            f"--host ({host}) is reached from outside this machine, and answers hold presigned URLs: listen on "
            "127.0.0.1 behind a reverse proxy with TLS, or say --behind-tls where that proxy is another machine"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises BadInput when the address isn't free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio clears Nagle's delay only where the protocol is named. With it half of an answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise BadInput(f"--host {host} --port {port} can't be listened at ({error.strerror}): choose others") from error
    return listener
