"""Starts a gateway: the run, its rules and limits put together, behind uvicorn, at an address where that is safe.

It speaks plain HTTP. TLS, slow clients and floods by strangers are the business of the reverse proxy in front of it.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette

from composer_prime.errors import BadInput
from composer_prime.gateway.app import Gateway
from composer_prime.gateway.identity import Identities
from composer_prime.gateway.limits import Limits, Rates
from composer_prime.gateway.operations import Operations, tickets_of
from composer_prime.gateway.rules import MemberRules, RunFacts
from composer_prime.store import open_store
from composer_prime.store.base import MAX_CREATE_BYTES, Store
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.owner import check_guarded
from composer_prime.sync.roster import Roster

GRACE_S = 5
KEEP_ALIVE_S = 75
"""Longer than a site's pauses between two looks, so that it needn't connect anew."""


@dataclass(frozen=True)
class Served:
    """One run behind a gateway."""

    store: Store
    facts: RunFacts
    roster: Roster


def serve_run(store: Store, max_object_bytes: int, allowed: Collection[str] = ()) -> Served:
    """The run whose root `store` is, for objects of at most so many bytes.

    allowed   terms by which one site could ruin the run and which the owner accepts, see `owner.check_guarded`

    Raises BadInput when there is none, when it admits no keys by which its sites could be told apart, when none of
    them could be a guest or one could ruin it, or when its payloads are larger than that, or than what a store without
    presigned URLs takes.
    """
    manifest, sha = find_manifest(store)
    if manifest.owner is None:
        lacks = (
            "has no owner who could admit guests, and all its sites close rounds, which behind a gateway nobody does"
        )
        if not manifest.keys:
            lacks = "asks for no keys, and a gateway knows sites by their keys"
        raise BadInput(f"run {manifest.run} {lacks}: create a run with outer.owner")
    check_guarded(manifest, allowed)

    from composer_prime.sync.run import load_run  # its codecs bring torch, which nothing else here needs

    run = load_run(store)
    bounds = tuple(coding.facts.bounds for coding in run.codings)
    largest = max(most for _, most in bounds)
    if largest > max_object_bytes:
        raise BadInput(
            f"payloads of run {manifest.run} have up to {largest} bytes, this gateway takes {max_object_bytes} "
            "(--max-object-mib): raise it, or create the run with more outer.fragments"
        )
    if tickets_of(store) is None and largest > MAX_CREATE_BYTES:
        raise BadInput(
            f"payloads of run {manifest.run} have up to {largest} bytes, and {store.uri} gives no presigned URLs, so "
            f"that they would go through this gateway, which takes {MAX_CREATE_BYTES}: use an S3 bucket, or create the "
            "run with more outer.fragments"
        )
    facts = RunFacts(manifest.run, run.terms, bounds, max_object_bytes)
    return Served(store, facts, Roster(store, manifest, sha))


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
