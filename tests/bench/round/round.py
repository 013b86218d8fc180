"""`python -m tests.bench round`: a round of two sites against the same bytes moved by plain s3fs, in one run.

Two real processes and a SeaweedFS. The round is timed from the moment both hand over their movement until both hold the
new master: code, upload, offer, commit, download, check, decode, merge. The yardstick puts as many bytes and gets the
other's, no more.
"""

import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from rich.console import Console
from rich.table import Table

from composer_prime.errors import BadInput, SiteError
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.fragments import Fragment
from composer_prime.outer.merge import settling
from composer_prime.store import open_store
from composer_prime.sync.courier import Courier
from composer_prime.sync.driver import Driver
from composer_prime.sync.entering import SiteIdentity, enter
from composer_prime.sync.errands import Capture
from composer_prime.sync.learning import Present
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.start import Founding, create_or_join
from composer_prime.sync.terms import Terms
from tests.servers.weed import BUCKET, seaweed

SITES = ("a", "b")
T = TypeVar("T")


@dataclass(frozen=True)
class RoundBench:
    """What both processes need: the run's root (an s3:// URI), fp32 parameters, repeats, codec, the outer optimizer's.

    adopts   whether reading movement from the parameters, and moving them to the new master, counts as part of a round
    """

    uri: str
    params: int
    repeats: int
    codec: str
    adopts: bool = False
    lr: float = 1.0
    momentum: float = 0.0


def main(params: int = 25_000_000, repeats: int = 5, codec: str = "fp32") -> None:
    """Run the bench and print medians and their ratio.

    Raises BadInput without s3fs, a SeaweedFS to start, or such a codec; SiteError when a site ends early.
    """
    if find_spec("s3fs") is None:
        raise BadInput("bench round compares with s3fs, which isn't installed here: pip install s3fs")
    get_codec(codec)
    bench = RoundBench(f"s3://{BUCKET}/bench-round", params, repeats, codec)
    with tempfile.TemporaryDirectory() as folder, seaweed(Path(folder)) as server:
        os.environ.update(server.environment())
        rounds, plain = measure(bench)
    _print(bench, rounds, plain)


def measure(bench: RoundBench) -> tuple[list[float], list[float]]:
    """Seconds of each round and of each plain transfer, the slower process's, after one of each that warms up.

    Raises SiteError when a site ends early.
    """
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(len(SITES)), context.Queue()
    processes = [context.Process(target=_site, args=(bench, index, barrier, answers)) for index in range(len(SITES))]
    for process in processes:
        process.start()
    try:
        times = [_answer(answers, processes) for _ in SITES]
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()  # one that is left alone would wait for the other for ever
            process.join()
    rounds, plain = ([max(pair) for pair in zip(*series, strict=True)] for series in zip(*times, strict=True))
    return rounds[1:], plain[1:]


def _answer(answers: "Queue[T]", processes: Sequence[BaseProcess]) -> T:
    while True:
        try:
            return answers.get(timeout=0.5)
        except queue.Empty:
            for process, site in zip(processes, SITES, strict=True):
                if process.exitcode:
                    raise SiteError(
                        f"site {site} of the bench ended early with exit code {process.exitcode}: "
                        "its own words stand above"
                    ) from None


def _site(bench: RoundBench, index: int, barrier: Barrier, answers: Queue) -> None:
    """One site's process: rounds and plain transfers in turn, so that both meet the same neighbours on the machine."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(index)
    movement = torch.randn(bench.params, generator=generator) * 1e-3
    store, runtime = open_store(bench.uri), ThreadRuntime()
    if index:
        barrier.wait()
    params = LocalParameters({"w": torch.zeros(bench.params)})
    run = create_or_join(store, _terms(bench), "bench", SITES[index], params, runtime, Founding())
    if not index:
        barrier.wait()
    entered = enter(store, run, SiteIdentity(SITES[index]), runtime)
    courier = Present(store, entered, runtime=runtime).read()
    driver = Driver(courier, entered.pulse, entered.tape, runtime=runtime, beat_every_s=5.0, progress=lambda: (0, 0))
    driver.awaited = True  # as a training thread that has used up its delay
    driver.start("live")
    rounds, plain = [], []
    exchange = Exchange(courier, driver, params, run.fragments[0], adopts=bench.adopts)
    for number in range(bench.repeats + 1):
        rounds.append(exchange.timed_round(movement * (number + 1), number, barrier))
        plain.append(_timed_plain(bench, index, number, barrier))
    driver.close()
    courier.finish()
    answers.put((rounds, plain))


class Exchange:
    """A site's part in the rounds that are timed, as its training thread plays it."""

    def __init__(
        self, courier: Courier, driver: Driver, params: LocalParameters, fragment: Fragment, *, adopts: bool
    ) -> None:
        self._courier = courier
        self._driver = driver
        self._params = params
        self._fragment = fragment
        self._adopts = adopts
        self._base = params.read(fragment)

    def timed_round(self, movement: torch.Tensor, number: int, barrier: Barrier) -> float:
        """Seconds of round `number`, in which this site hands over `movement`, fp32 [n]."""
        captured = self._base - movement
        if self._adopts:
            self._params.write(self._fragment, captured)
        barrier.wait()
        started = time.perf_counter()
        if self._adopts:
            captured = self._params.read(self._fragment)
        self._courier.submit(Capture(0, self._base, captured, None, 10, 1, 10 * (number + 1)))
        self._driver.wake()
        with self._courier.changed:
            while self._courier.versions()[0] <= number:
                self._driver.check()
                self._courier.changed.wait(timeout=0.5)
        weights = self._courier.master(0).weights
        if self._adopts:
            self._params.change(self._fragment, settling(captured, weights))
        self._base = weights
        elapsed = time.perf_counter() - started
        self._courier.collect(0)
        return elapsed


def _timed_plain(bench: RoundBench, index: int, number: int, barrier: Barrier) -> float:
    from s3fs import S3FileSystem

    files = S3FileSystem(
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs=dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required"),
    )
    data = os.urandom(get_codec(bench.codec).nbytes(bench.params))
    places = [f"{bench.uri.removeprefix('s3://')}/plain/{number}/{site}" for site in range(len(SITES))]
    files.exists(places[index])  # the first contact isn't the yardstick's either
    barrier.wait()
    started = time.perf_counter()
    files.pipe_file(places[index], data)
    barrier.wait()
    files.cat_file(places[1 - index])
    return time.perf_counter() - started


def _terms(bench: RoundBench) -> Terms:
    return Terms(
        inner_steps=1,
        fragments=1,
        sync_delay=0,
        lr=bench.lr,
        momentum=bench.momentum,
        codec=cast(Any, bench.codec),
        quorum=len(SITES),
        grace_s=60.0,
        liveness_s=60.0,
        max_stale_rounds=4,
        snapshot_rounds=10**6,
        rounds=bench.repeats + 9,
    )


def _print(bench: RoundBench, rounds: list[float], plain: list[float]) -> None:
    table = Table(title=f"two sites, {bench.params:,} fp32 parameters, {bench.codec}")
    for column in ("", "median s", "least s", "most s"):
        table.add_column(column, justify="left" if not column else "right")
    for name, times in (("round", rounds), ("plain s3fs", plain)):
        table.add_row(name, *(f"{value:.3f}" for value in (statistics.median(times), min(times), max(times))))
    console = Console()
    console.print(table)
    ratios = [ours / theirs for ours, theirs in zip(rounds, plain, strict=True)]
    console.print(f"ratio, median of pairs: {statistics.median(ratios):.2f}; load {os.getloadavg()[0]:.2f}")
