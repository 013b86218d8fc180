"""`python -m tests.bench storm`: real site processes on a real store, under faults; what was lost, and what it cost.

Sites are tiny and their inner steps timed waits, so that one machine carries many; everything else is what a run uses:
the outer loop on threads, the S3 store, checkpoints and journals on disk. Nothing is done by hand.
"""

import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from composer_prime.errors import SiteError
from composer_prime.sync.terms import Terms
from tests.bench.storm.book import StormSiteConfig
from tests.bench.storm.faults import SCRIPTS, Fault, Script, schedule
from tests.bench.storm.gate import Gate, Gates
from tests.bench.storm.nursery import Nursery
from tests.bench.storm.places import Place
from tests.bench.storm.plan import Record, StormPlan, make_terms
from tests.bench.storm.report import StormReport
from tests.bench.storm.server import BUCKET, StormServer, aws_environment

TICK_S = 0.02
REAP_S = 0.1
WARM_S = 120.0
"""Longest that the sites may take to close the first round of each fragment."""
FINISH_S = 180.0
"""Longest that the run may take beyond 1.6 times its planned length."""


class Storm:
    """Plays one storm. Use it on the main thread; it ends what it started."""

    def __init__(self, folder: Path, plan: StormPlan, terms: Terms, run: str, machinery: "Machinery") -> None:
        self.plan = plan
        self.terms = terms
        self.server = machinery.server
        self.store_down = False
        self.outage_s = plan.outage_s
        self._folder = folder / run
        self._run = run
        self._gates = machinery.gates
        self._nursery = machinery.nursery
        self._chance = random.Random(plan.seed)
        self.places: dict[str, Place] = {}
        self.record = Record(plan, terms, f"s3://{BUCKET}/{run}", self.places, self._nursery.import_s)
        self._scripts: list[tuple[float, Fault, Script]] = []
        self._reaped_at = 0.0

    def play(self) -> Record:
        """All of it: sites start, warm up, weather the faults, and come to the run's own end."""
        record, duration_s = self.record, self.plan.duration_s
        try:
            for _ in range(self.plan.num_sites):
                self.add_place()
            self._warm_up()
            record.warm_at, busy, requests = time.monotonic(), _cpu_times(), self._num_requests()
            self._plan_faults()
            self._tick_until(record.warm_at + duration_s, self._all_done)
            record.over_at, record.busy_share, record.load = time.monotonic(), _share(busy), os.getloadavg()[0]
            record.requests_per_s = (self._num_requests() - requests) / (record.over_at - record.warm_at)
            until = record.warm_at + 1.6 * duration_s + FINISH_S
            self._tick_until(until, lambda: self._all_done() and not self._is_hit())
            record.ended_at = time.monotonic()
        finally:
            for place in self.places.values():
                place.send(signal.SIGKILL)
                place.gate.cut()
        return record

    def _all_done(self) -> bool:
        return all(place.done for place in self.places.values())

    def _is_hit(self) -> bool:
        return any(fault.began_at is not None for _, fault, _ in self._scripts)

    def _num_requests(self) -> int:
        return sum(place.gate.weather.requests for place in self.places.values())

    # --- what the scripts ask ---------------------------------------------------------------------------------------

    def victim(self, fault: Fault) -> Place | None:
        """A site that nothing else has hit and that has been up for a while; it is hit from now on."""
        able = [place for place in self.places.values() if place.is_able()]
        if not able:
            return None
        place = self._chance.choice(able)
        place.is_hit, fault.site = True, place.name
        return place

    def strike(self, fault: Fault, place: Place | None) -> None:
        """The fault happens now."""
        fault.began_at = time.monotonic()
        fault.site = None if place is None else place.name

    def add_place(self) -> Place:
        """A site of a new name, started."""
        name = f"s{len(self.places):02d}"
        folder = self._folder / name
        folder.mkdir(parents=True)
        gate = self._gates.open(self.server.port, f"/{BUCKET}/{self._run}/", self._chance.randrange(2**32))
        config = folder / "site.json"
        place = Place(name, folder, gate, config, self._nursery, why="late" if self.record.warm_at else "first")
        self._orders(name, folder, gate).write(config)
        place.start(time.monotonic())
        self.places[name] = place
        return place

    def _orders(self, name: str, folder: Path, gate: Gate) -> StormSiteConfig:
        plan = self.plan
        return StormSiteConfig(
            site=name,
            folder=str(folder),
            uri=self.record.uri,
            environment=aws_environment(gate.port),
            terms=self.terms.model_dump(),
            numel=plan.numel,
            step_s=plan.step_s,
            step_tokens=plan.step_tokens,
            checkpoint_steps=plan.checkpoint_steps,
        )

    # --- the storm's own loop ---------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        until = time.monotonic() + WARM_S
        self._tick_until(until, lambda: all(min(place.versions(), default=0) > 0 for place in self.places.values()))
        if time.monotonic() > until:
            seen = {place.name: place.versions() for place in self.places.values()}
            raise SiteError(f"the sites closed no round of each fragment within {WARM_S:.0f} s: {seen}")

    def _plan_faults(self) -> None:
        plan, record = self.plan, self.record
        last_at = record.warm_at + plan.duration_s - min(15.0, plan.duration_s / 5)
        record.faults = schedule(plan.seed, record.warm_at, last_at, plan.num_faults, plan.kinds)
        if plan.outage_s:
            record.faults.append(Fault("outage", record.warm_at + plan.duration_s / 3))
        for fault in record.faults:
            script = SCRIPTS[fault.kind](self, fault, self._chance)
            self._scripts.append((fault.due_at, fault, script))

    def _tick_until(self, until: float, is_over: Callable[[], bool]) -> None:
        looked_at = 0.0
        while (now := time.monotonic()) < until:
            self._play_scripts(now)
            if now - self._reaped_at > REAP_S:
                self._reaped_at = now
                self._supervise(now)
            if now - looked_at > 0.5:
                looked_at = now
                if is_over():
                    return
            time.sleep(TICK_S)

    def _play_scripts(self, now: float) -> None:
        waiting = []
        for due_at, fault, script in self._scripts:
            if due_at > now:
                waiting.append((due_at, fault, script))
                continue
            pause = next(script, None)
            if pause is not None:
                waiting.append((now + pause, fault, script))
            else:
                self._end(fault)
        self._scripts = waiting

    def _end(self, fault: Fault) -> None:
        fault.ended_at = time.monotonic()
        place = self.places.get(fault.site or "")
        if place is not None:
            place.release()
            if fault.began_at is not None and fault.kind not in ("join", "slow"):
                place.down.append((fault.began_at, fault.ended_at))

    def _supervise(self, now: float) -> None:
        """Start what has died, by itself."""
        ended = dict(self._nursery.ended())
        for place in self.places.values():
            if place.pid in ended:
                place.ended(ended[place.pid], now)
            if place.start_at is not None and now >= place.start_at and not place.done:
                place.start(now)


def _cpu_times() -> tuple[float, float]:
    """(busy, all) ticks of the machine so far; zeros where /proc isn't there."""
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))


def _share(before: tuple[float, float]) -> float:
    busy, total = (now - then for now, then in zip(_cpu_times(), before, strict=True))
    return busy / total if total else math.nan


@dataclass(frozen=True)
class Machinery:
    """What a storm and its fault-free reference share."""

    server: StormServer
    gates: Gates
    nursery: Nursery


@contextmanager
def machinery(folder: Path) -> Iterator[Machinery]:
    """A store, gates and a nursery, until the block ends."""
    with ExitStack() as stack:
        server = StormServer(folder)
        stack.callback(server.close)
        gates = Gates()
        stack.callback(gates.close)
        server.start()
        nursery = Nursery(folder)
        stack.callback(nursery.close)
        server.wait_ready()
        yield Machinery(server, gates, nursery)


def run_storm(
    folder: Path, plan: StormPlan, reference_s: float, say: Callable[[str], object] = lambda line: None
) -> StormReport:
    """The storm, and before it a fault-free run of `reference_s` to compare with; 0: none. Returns the report."""
    from tests.bench.storm.reading import read_report

    with machinery(folder) as shared:

        def play(run: str, planned: StormPlan, round_s: float) -> StormReport:
            record = Storm(folder, planned, make_terms(planned, round_s), run, shared).play()
            return read_report(record, shared.server.environment)

        reference = None
        if reference_s:
            say(f"a fault-free run of {reference_s:.0f} s to compare with")
            reference = play(
                "reference", replace(plan, duration_s=reference_s, num_faults=0, outage_s=0.0), plan.turn_s
            )
            say(f"  {reference.tokens_per_s:.0f} tokens merged a second, a round takes {reference.round_s:.2f} s")
        outage = f", an outage of {plan.outage_s:.0f} s" if plan.outage_s else ""
        say(f"the storm: {plan.duration_s:.0f} s, faults: {plan.num_faults}{outage}")
        # more rounds than fit, so that the run doesn't end before its time is over
        report = play("storm", plan, plan.turn_s if reference is None else 0.9 * reference.round_s)
        return report.against(reference)


def main(
    sites: int = 16,
    minutes: float = 10.0,
    seed: int = 0,
    faults_per_hour: float = 125.0,
    outage_s: float = 0.0,
    reference_minutes: float = 1.0,
    liveness_s: float = 6.0,
    json_path: Path | None = None,
    folder: Path | None = None,
) -> int:
    """Run the bench and print its table; the exit code is 1 when masters differ or the log has a fault.

    folder   keeps books, logs and the store's data; None: a temporary one
    """
    console = Console()
    plan = StormPlan(
        num_sites=sites,
        duration_s=60 * minutes,
        seed=seed,
        num_faults=round(faults_per_hour * minutes / 60),
        outage_s=outage_s,
        liveness_s=liveness_s,
    )
    with tempfile.TemporaryDirectory(prefix="storm-") as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        report = run_storm(place, plan, 60 * reference_minutes, console.print)
    console.print(report.draw())
    if json_path is not None:
        json_path.write_text(report.to_json())
    return int(bool(report.hash_differences or report.log_faults))
