"""`python -m tests.bench outer`: what one round costs, phase by phase, for a given number of parameters and a store.

Two sites on one machine, one fragment, real payloads through a real store; medians over `repeats` rounds.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from composer_prime.outer.aggregate import weighted_mean
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.outer_optimizer import nesterov_step
from composer_prime.store import open_store, probe_store
from composer_prime.store.base import Store
from composer_prime.sync.courier import Courier
from composer_prime.sync.entering import SiteIdentity, enter
from composer_prime.sync.errands import Capture
from composer_prime.sync.learning import Present
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.start import Founding, create_or_join
from composer_prime.sync.terms import Terms

PHASES = ("encode", "upload", "commit", "download", "decode", "apply", "round")
COMMIT_BYTES = 1000
"""About the size of a commit of two offers."""


def main(params: int = 10_000_000, repeats: int = 5, codec: str = "int8", store_uri: str | None = None) -> None:
    """Run the bench and print its table.

    params      fp32 parameters of the fragment
    repeats     rounds measured, after one that warms up
    store_uri   where payloads go; None: a temporary folder
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        uri = f"{store_uri or Path(folder)}/bench-{os.getpid()}-{time.time_ns()}"
        store = open_store(uri)
        probe_store(store)
        phases = measure(store, params, repeats, codec)
        store.close()
    _print(phases, params, codec, uri)


def measure(store: Store, params: int, repeats: int, codec: str) -> Mapping[str, list[float]]:
    """Seconds of each phase of each round: coding and moving one payload, and a whole round of two sites."""
    generator = torch.Generator().manual_seed(0)
    movement = torch.randn(params, generator=generator) * 1e-3
    other = movement.flip(0).contiguous()
    coder = get_codec(codec)
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def timed(phase: str, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        times[phase].append(time.perf_counter() - started)

    sites = _make_sites(store, params, repeats + 1, codec)
    master, outer_momentum = torch.zeros(params), torch.zeros(params)
    payload = coder.encode(movement)
    for number in range(repeats + 1):
        key = f"bench/{number}"
        timed("encode", partial(coder.encode, movement))
        timed("upload", partial(store.put, key, payload))
        timed("commit", partial(store.create, f"{key}-commit", os.urandom(COMMIT_BYTES)))
        timed("download", partial(store.get, key))
        timed("decode", partial(coder.decode, payload, params))
        timed("apply", partial(_apply, master, outer_momentum, movement))
        timed("round", partial(_run_round, sites, (movement, other)))
    return {phase: values[1:] for phase, values in times.items()}


def _apply(master: torch.Tensor, momentum: torch.Tensor, movement: torch.Tensor) -> None:
    """The mean of two payloads and the outer step."""
    mean = weighted_mean([(0.5, movement), (0.5, movement)])
    nesterov_step(master, mean, momentum, lr=0.7, mu=0.9)


def _make_sites(store: Store, params: int, rounds: int, codec: str) -> list[Courier]:
    terms = Terms(
        inner_steps=1,
        fragments=1,
        sync_delay=0,
        lr=0.7,
        momentum=0.9,
        codec=cast(Any, codec),
        weighting="tokens",
        quorum=2,
        grace_s=60.0,
        liveness_s=600.0,
        max_stale_rounds=4,
        snapshot_rounds=10**6,
        rounds=rounds + 1,
    )
    named = LocalParameters({"weight": torch.zeros(params)})
    runtime, sites = ThreadRuntime(), []
    for name in ("a", "b"):
        run = create_or_join(store, terms, "bench", name, named, runtime, Founding())
        entered = enter(store, run, SiteIdentity(name), runtime)
        entered.pulse.beat("live", (0,), (0,), 0, 0)
        sites.append(Present(store, entered, runtime=runtime).read())
    return sites


def _run_round(sites: list[Courier], movements: Sequence[torch.Tensor]) -> None:
    """All sites offer, one commits, all apply: from the captures to the new master at each."""
    version = sites[0].versions()[0]
    for site, movement in zip(sites, movements, strict=True):
        site.submit(Capture(0, movement, torch.zeros_like(movement), None, 10, 1, 10 * (version + 1)))
    while any(site.versions()[0] == version for site in sites):
        for site in sites:
            site.tick()
    for site in sites:
        site.collect(0)


def _print(phases: Mapping[str, list[float]], params: int, codec: str, uri: str) -> None:
    raw_bytes = params * 4
    table = Table(
        title=f"outer loop: {params:,} fp32 parameters, {codec}, {uri.split('://')[0] if '://' in uri else 'file'}"
    )
    for column in ("phase", "median s", "MB/s of fp32"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in PHASES:
        median = statistics.median(phases[phase])
        table.add_row(phase, f"{median:.4f}", f"{raw_bytes / median / 1e6:,.0f}" if phase != "commit" else "-")
    console = Console()
    console.print(table)
    payload = get_codec(codec).nbytes(params)
    console.print(
        f"payload {payload:,} bytes ({raw_bytes / payload:.2f}x smaller than fp32); load {os.getloadavg()[0]:.2f}"
    )
