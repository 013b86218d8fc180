"""A site that waits says so, with the cause and since when: on its own line at once, and in the run's event log."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from composer_prime.errors import KeyMissing, StoreError
from composer_prime.store import keys
from composer_prime.store.file import FileStore
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.visible import log_handler
from composer_prime.waiting import Waits, read_waiting
from composer_prime.watch.status import look
from composer_prime.watch.tables import draw
from tests.simulation.runtime import Process, Scheduler, SimRuntime
from tests.sync.harness import make_net, make_terms

REQUEST_S = 0.003
STEP_S = 1.0


class UnsteadyStore(FileStore):
    """A folder whose requests take time, that can be read-only, and that can lose what one site asks for."""

    def __init__(self, root: Path, process: Process) -> None:
        super().__init__(root)
        self.process = process
        self.is_read_only = False
        self.loses: Callable[[str], bool] = lambda key: False

    def _request(self, key: str, writes: bool) -> None:
        self.process.sleep(REQUEST_S)
        if writes and self.is_read_only:
            raise StoreError(f"put of {key} in {self.uri} failed: Read-only file system: choose another")
        if self.loses(key):
            raise KeyMissing(f"no object at {key} in {self.uri}")

    def create(self, key: str, data: bytes) -> bool:
        self._request(key, writes=True)
        return super().create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._request(key, writes=True)
        super().put(key, data)

    def get(self, key: str) -> bytes:
        self._request(key, writes=False)
        return super().get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._request(key, writes=False)
        return super().get_range(key, start, length)


class VirtualSite:
    """A small real site on the simulation's clock: its outer loop trains a step a second, until its run ends."""

    def __init__(self, scheduler: Scheduler, root: Path, folder: Path, name: str, **terms: object) -> None:
        self.process = Process(scheduler, name)
        runtime = SimRuntime(self.process)
        self.store = UnsteadyStore(root, self.process)
        self.file = folder / f"{name}.json"
        self.outer = OuterLoop(
            self.store,
            make_terms(**{"fragments": 1, "rounds": 40, "inner_steps": 2, "liveness_s": 30.0, **terms}),
            run="run",
            site=name,
            runtime=runtime,
            waits=Waits(self.file, runtime.now, runtime.now),
        )
        self.process.spawn(self._train)

    def _train(self) -> None:
        net = make_net()
        self.outer.join(net.named_parameters())
        while not self.outer.finished:
            self.process.sleep(STEP_S)
            self.outer.after_inner_step(tokens=10, samples=2)
        self.outer.close()

    def run(self, until: float) -> None:
        self.process.scheduler.run(until, 10**7)
        if self.process.error is not None:
            raise self.process.error


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The lines of the package's own log, as every process of ours writes it."""
    written, ours = io.StringIO(), logging.getLogger("composer_prime")
    handler, level = log_handler(written), ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    yield written
    ours.removeHandler(handler)
    ours.setLevel(level)


def shown(root: Path) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        draw(look(FileStore(root)), console)
    return captured.get()


def test_a_bucket_that_is_read_only_for_a_minute_is_a_try_a_second_few_lines_and_a_wait_that_is_told(
    scheduler: Scheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture, log: io.StringIO
) -> None:
    root = tmp_path / "bucket"
    site = VirtualSite(scheduler, root, tmp_path, "a")
    site.run(10.0)
    assert "waits" not in shown(root)
    log.truncate(0)
    caplog.clear()
    site.store.is_read_only = True
    site.run(35.0)
    assert read_waiting(site.file) is None, "not yet 30 s"
    site.run(70.0)
    lines = log.getvalue().splitlines()
    tries = [record for record in caplog.records if record.message.startswith("store_failed")]
    assert 50 < len(tries) <= 62 and len(lines) < 20, (len(tries), len(lines))
    here = read_waiting(site.file)
    assert here is not None and "Read-only file system" in here.cause and 9 < here.since < 13
    site.store.is_read_only = False
    site.run(100.0)
    assert read_waiting(site.file) is None and json.loads(site.file.read_text())["until"] > 69
    waited = look(FileStore(root)).sites[0].waits
    assert waited is not None and waited.until is not None and "Read-only file system" in waited.cause
    assert "site a waited since 1970-01-01T00:00:1" in shown(root)


def test_a_payload_that_is_missing_is_what_its_readers_wait_for(scheduler: Scheduler, tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    a, b = (VirtualSite(scheduler, root, tmp_path, name, quorum=2, rounds=1000) for name in "ab")
    b.run(20.0)
    a.store.loses = keys.is_payload
    b.run(80.0)
    waits = {each.site: each.waits for each in look(FileStore(root)).sites}
    assert waits["a"] is not None and waits["a"].until is None
    assert "no object at rounds/" in waits["a"].cause and 19 < waits["a"].since < 30
    assert "site a waits since 1970-01-01T00:00:2" in shown(root) and "no object at rounds/" in shown(root)


def test_a_site_that_waits_for_others_says_so(scheduler: Scheduler, tmp_path: Path) -> None:
    site = VirtualSite(scheduler, tmp_path / "bucket", tmp_path, "a", quorum=2)
    site.run(60.0)
    here = read_waiting(site.file)
    assert here is not None and here.cause == "the other sites, before round 0 closes"
    assert "site a waits since 1970-01-01T00:00:0" in shown(tmp_path / "bucket")
