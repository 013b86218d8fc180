"""`composer-prime bench gateway`: signed requests a second of a real gateway process over loopback, before a folder.

The client is a site's own store, one request after another on a connection that it keeps. Beside the gateway as it is
stands one that clears TCP_NODELAY on what it accepts, as gateways had it once; both are asked in turn.
"""

import asyncio
import multiprocessing
import os
import queue
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.queues import Queue
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from composer_prime.errors import SiteError
from composer_prime.gateway.connections import GatewayServer, GuardedProtocol
from composer_prime.gateway.limits import Rate, Rates
from composer_prime.gateway.serving import Listening, serve
from composer_prime.store import Store, keys, open_store
from composer_prime.store.gateway import open_gateway
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.owner import Owner
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding, create_or_join
from composer_prime.sync.terms import Terms

RUN, GUEST = "bench", "guest"
ARMS = {"TCP_NODELAY off": True, "TCP_NODELAY on": False}
"""Whether the gateway holds its answers back."""
ASKED: Mapping[str, Callable[[Store], object]] = {
    "get of a record": lambda store: store.get(keys.manifest()),
    "list": lambda store: store.list(keys.round_prefix(0, 0)),
    "put of a tape's piece": lambda store: store.create(*_piece()),
}
BLOCK = 20
"""Requests of one kind to one gateway before it is the other's turn."""
READY_S = 60.0
FREELY = Rates(site=Rate(1e6, 1e6), gateway=Rate(1e6, 1e6), record_bytes=Rate(1e9, 1e9))


class _HoldingBack(GuardedProtocol):
    """A connection as `socket.create_server` and asyncio leave it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)


def main(requests: int = 300) -> None:
    """Run the bench and print it.

    requests   of each kind to each gateway, after one block that isn't counted
    """
    times = measure(requests)
    table = Table(title="signed requests, one after another", title_justify="left")
    for column in ("gateway", "request", "a second", "median ms", "p95 ms"):
        table.add_column(column, justify="left" if column in ("gateway", "request") else "right")
    for (arm, asked), each in times.items():
        median, p95 = statistics.median(each), statistics.quantiles(each, n=20)[-1]
        table.add_row(arm, asked, f"{len(each) / sum(each):.0f}", f"{1e3 * median:.1f}", f"{1e3 * p95:.1f}")
    console = Console()
    console.print(table)
    console.print(f"{requests} requests of each kind to each gateway, in turn; load {os.getloadavg()[0]:.2f}")


def measure(requests: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each request, by gateway and kind. Raises SiteError when a gateway doesn't start."""
    times: dict[tuple[str, str], list[float]] = {(arm, asked): [] for arm in ARMS for asked in ASKED}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        key_file = _make_run(folder)
        stores = {}
        for arm, holds_back in ARMS.items():
            place = stack.enter_context(_gateway(str(folder / "bucket"), holds_back, folder / f"{holds_back}.jsonl"))
            stores[arm] = stack.enter_context(closing(open_gateway("http", f"{place}/{RUN}", key_file)))
        for start in range(-BLOCK, requests, BLOCK):
            for (arm, asked), each in times.items():
                block = [_timed(ASKED[asked], stores[arm]) for _ in range(min(BLOCK, requests - start))]
                each.extend(block if start >= 0 else [])
    return times


def _timed(ask: Callable[[Store], object], store: Store) -> float:
    started = time.perf_counter()
    ask(store)
    return time.perf_counter() - started


def _piece() -> tuple[str, bytes]:
    """Key and bytes of a piece of tape that isn't there yet."""
    data = b'{"event": "join", "site": "guest", "incarnation": 0, "nonce": "%s"}\n' % os.urandom(8).hex().encode()
    return keys.tape(GUEST, 0, sha256_hex(data)), data


def _make_run(folder: Path) -> Path:
    """A run with keys in `folder`/bucket; the key file of its guest."""
    owner, key = SigningKey.generate(), SigningKey.generate()
    terms = Terms(
        inner_steps=1,
        fragments=1,
        sync_delay=0,
        lr=1.0,
        momentum=0.0,
        codec="fp32",
        weighting="equal",
        aggregate="clipped",
        quorum=1,
        grace_s=60.0,
        liveness_s=60.0,
        max_stale_rounds=4,
        snapshot_rounds=10**6,
        rounds=1,
    )
    founding = Founding(owner.public, {"a": SigningKey.generate().public})
    store, params = open_store(str(folder / "bucket")), LocalParameters({"w": torch.zeros(1)})
    create_or_join(store, terms, RUN, "a", params, ThreadRuntime(), founding)
    Owner(store, owner).admit(GUEST, key.public, guest=True)
    key.save(folder / "guest.key")
    return folder / "guest.key"


@contextmanager
def _gateway(uri: str, holds_back: bool, audit: Path) -> Iterator[str]:
    """Host and port of a gateway of that run, in a process of its own, until the block ends."""
    context = multiprocessing.get_context("spawn")
    said: Queue[str] = context.Queue()
    process = context.Process(target=_serve, args=(uri, holds_back, audit, said), daemon=True)
    process.start()
    try:
        found = re.search(r"http://(\S+)", said.get(timeout=READY_S))
        assert found is not None
        yield found[1]
    except queue.Empty:
        raise SiteError(
            f"the bench's gateway did not start within {READY_S:.0f} s: its own words stand above"
        ) from None
    finally:
        process.terminate()
        process.join()


def _serve(uri: str, holds_back: bool, audit: Path, said: "Queue[str]") -> None:
    if holds_back:
        GatewayServer.protocol = _HoldingBack
    serve(uri, Listening("127.0.0.1", 0), audit=audit, rates=FREELY, max_object_bytes=2**20, say=said.put)
