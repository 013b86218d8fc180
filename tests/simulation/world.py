"""One simulated run: sites, a bucket, and a plan of faults, until the run has ended or doesn't any more.

result = run_seed(123)
result.violations
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from composer_prime.errors import ComposerPrimeError
from composer_prime.store import keys
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.records import Admission, Manifest
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.simulation.coverage import Coverage
from tests.simulation.hooks import listening
from tests.simulation.invariants import Invariants
from tests.simulation.plan import EVERYONE, Fault, Plan, draw_plan
from tests.simulation.progress import Progress
from tests.simulation.runtime import Events, Scheduler
from tests.simulation.site import Checkpoint, Site, SiteProcess
from tests.simulation.store import Bucket, Link

OWNER = SigningKey.from_bytes(bytes(range(32)))
MOST_EVENTS = 400_000
"""No sound run needs more."""
PATIENCE_S = 240.0
"""Virtual seconds, beside what the run and its time-outs need, after which a run that goes on has stopped."""


@dataclass(frozen=True)
class Result:
    """What one run was like."""

    plan: Plan
    events: Events
    ended_at_s: float
    violations: tuple[str, ...]
    branches: dict[str, int]
    log: tuple[tuple[Any, ...], ...] = ()

    @property
    def num_events(self) -> int:
        """Of all kinds."""
        return self.events.total

    @property
    def log_sha256(self) -> str:
        """One hash of every request, in order, with its time and answer."""
        return hashlib.sha256("\n".join(map(repr, self.log)).encode()).hexdigest()


class World:
    """A plan being played."""

    playing: "World"
    """The one that is played just now."""

    def __init__(self, plan: Plan, *, record: bool = False) -> None:
        self.plan = plan
        self.terms = plan.terms
        self.scheduler = Scheduler()
        self.coverage = Coverage()
        self.log: list[tuple[Any, ...]] | None = [] if record else None
        self.bucket = Bucket()
        self.flipped_bits: set[tuple[int, int]] = set()
        rng = random.Random(plan.seed + 1)
        self.sites = {f"s{index:02d}": self._site(index, rng) for index in range(plan.num_sites)}
        signing = self.sites.values() if plan.signed else ()
        self.keys = {site.name: SigningKey.from_bytes(bytes([7, site.index]) * 16) for site in signing}
        self.guests = tuple(f"s{index:02d}" for index in plan.guests)
        owner = OWNER.public if self.guests else None
        nonces = random.Random(plan.seed + 2)
        self.founding = Founding(
            owner,
            {name: key.public for name, key in self.keys.items()},
            draw=lambda: f"{nonces.getrandbits(128):032x}",
        )
        self.invariants = Invariants(self)
        self.bucket.on_write = self._wrote
        self.bucket.on_delete = self.invariants.deleted
        self.bucket.on_beat = lambda data: self.invariants.pins.beat(data, self.scheduler.time)
        self._pending = 0
        self._healed_at = 0.0
        self._processes: list[SiteProcess] = []
        self._plan_starts(rng)
        for fault in plan.faults:
            self._plan_fault(fault)
        self.progress = Progress(self, self._round_s() + self.terms.liveness_s)

    def _site(self, index: int, rng: random.Random) -> Site:
        link = Link(latency_s=0.01 + 0.05 * rng.random(), upload_s=0.05 + 0.2 * rng.random())
        if self.plan.hasty:
            link.master_s = 3.0 + 4.0 * (index % 3)
        own = random.Random(rng.random())
        return Site(f"s{index:02d}", index, link, own, self.plan.step_s)

    def _plan_starts(self, rng: random.Random) -> None:
        kinds = {(fault.kind, fault.site): fault for fault in self.plan.faults}
        race = ("race", -1) in kinds
        for site in self.sites.values():
            at_s = 0.0 if race else rng.random() * 3
            if fault := kinds.get(("late", site.index)):
                at_s = fault.at_s
            if fault := kinds.get(("phase", site.index)):
                site.step_s *= fault.amount
            if fault := kinds.get(("skew", site.index)):
                site.skew = fault.amount
            if fault := kinds.get(("slow_upload", site.index)):
                site.link.upload_s = fault.amount
            self._later(at_s, lambda site=site: self._start(site, None))

    def _later(self, at_s: float, act: Any) -> None:
        self._pending += 1
        self._healed_at = max(self._healed_at, at_s)

        def run() -> None:
            self._pending -= 1
            self.progress.look()
            act()
            self.progress.look()
            self.look_for_end()

        self.scheduler.call_at(at_s, run)

    def _start(self, site: Site, checkpoint: Checkpoint | None) -> None:
        self._note("start", site.name, "empty" if checkpoint is None else "from a checkpoint")
        site.process = SiteProcess(self, site, checkpoint)
        self._processes.append(site.process)

    def _note(self, *what: Any) -> None:
        if self.log is not None:
            self.log.append((self.scheduler.time, "--", *what))

    def _wrote(self, key: str, data: bytes) -> None:
        self.invariants.wrote(key, data)
        if key == keys.manifest() and self.guests:  # the owner's first act, at once
            record = Admission(number=1, keys=dict(self.founding.keys), guests=self.guests)
            signature = OWNER.sign(record.message(sha256_hex(data)))
            signed = record.model_copy(update={"signature": signature})
            self.bucket.create(keys.admission(1), signed.to_bytes())

    # --- faults -----------------------------------------------------------------------------------------------------

    def _plan_fault(self, fault: Fault) -> None:
        act = getattr(self, f"_{fault.kind}", None)
        if fault.site == EVERYONE and act is not None:
            self._later(fault.at_s, lambda: self._strike_all(fault, act))
        elif act is not None:
            site = self.sites[f"s{fault.site:02d}"]
            self._later(fault.at_s, lambda: self._strike(fault, site, act))

    def _strike(self, fault: Fault, site: Site, act: Any) -> None:
        process = site.process
        if process is not None and process.is_running and not process.process.is_paused and not site.is_gone:
            self._note("fault", fault.kind, site.name, fault.for_s, fault.amount)
            self._struck(fault.kind)
            act(fault, site)

    def _strike_all(self, fault: Fault, act: Any) -> None:
        if any(site.process is not None and site.process.is_running for site in self.sites.values()):
            self._note("fault", fault.kind, "all", fault.for_s)
            self._struck(fault.kind)
            act(fault)

    def _struck(self, kind: str) -> None:
        self.scheduler.num_events += 1
        self.scheduler.num_faults += 1
        self.coverage.branch(f"fault: {kind}")

    def _outage(self, fault: Fault) -> None:
        """The store answers nobody."""
        for site in self.sites.values():
            self._cut(fault, site)

    def _restart(self, fault: Fault) -> None:
        """Every process is killed; each site that had one, be it the older of two, starts again from its checkpoint."""
        running = [process for process in self._processes if process.is_running]
        killed = [site for site in self.sites.values() if any(process.site is site for process in running)]
        for process in running:
            process.kill()

        def back() -> None:
            for site in killed:
                self._start(site, site.disk.checkpoints[-1] if site.disk.checkpoints else None)

        self._later(self.scheduler.time + fault.for_s, back)

    def _crash(self, fault: Fault, site: Site, age: int = 0, empty: bool = False) -> None:
        assert site.process is not None
        site.process.kill()

        def back() -> None:
            if empty:
                site.disk = type(site.disk)()
            saved = site.disk.checkpoints
            del saved[max(1, len(saved) - age) :]
            self._start(site, saved[-1] if saved else None)

        self._later(self.scheduler.time + fault.for_s, back)

    def _crash_old(self, fault: Fault, site: Site) -> None:
        self._crash(fault, site, age=int(fault.amount))

    def _crash_empty(self, fault: Fault, site: Site) -> None:
        self._crash(fault, site, empty=True)

    def _lost(self, fault: Fault, site: Site) -> None:
        assert site.process is not None
        site.process.kill()
        site.is_gone = True

    def _leave(self, fault: Fault, site: Site) -> None:
        assert site.process is not None
        site.process.leave()
        site.is_gone = True

    def _pause(self, fault: Fault, site: Site) -> None:
        assert site.process is not None
        process = site.process.process
        process.pause()
        self._later(self.scheduler.time + fault.for_s, process.resume)

    _absent = _pause

    def _twin(self, fault: Fault, site: Site) -> None:
        """The process stands still, another of its name starts elsewhere from a copy of its disk; then it goes on."""
        assert site.process is not None
        old = site.process.process
        old.pause()
        self._later(self.scheduler.time + 0.3 * fault.for_s, lambda: self._start_elsewhere(site))
        self._later(self.scheduler.time + fault.for_s, old.resume)

    def _replace(self, fault: Fault, site: Site) -> None:
        """Another process of the name starts while the first one runs."""
        self._start_elsewhere(site)

    def _both(self, fault: Fault, site: Site) -> None:
        """It crashes, and comes back as two processes at once: each has a copy of its disk."""
        assert site.process is not None
        site.process.kill()

        def back() -> None:
            self._start_elsewhere(site)
            self._start_elsewhere(site)

        self._later(self.scheduler.time + fault.for_s, back)

    def _start_elsewhere(self, site: Site) -> None:
        site.disk = site.disk.copy()
        self._start(site, site.disk.checkpoints[-1] if site.disk.checkpoints else None)

    def _cut(self, fault: Fault, site: Site) -> None:
        link = site.link
        link.num_cuts += 1
        self._later(self.scheduler.time + fault.for_s, lambda: setattr(link, "num_cuts", link.num_cuts - 1))

    def _slow(self, fault: Fault, site: Site) -> None:
        site.link.factor = fault.amount
        self._later(self.scheduler.time + fault.for_s, lambda: setattr(site.link, "factor", 1.0))

    def _loss(self, fault: Fault, site: Site) -> None:
        site.link.loss = fault.amount
        self._later(self.scheduler.time + fault.for_s, lambda: setattr(site.link, "loss", 0.0))

    def _unreadable(self, fault: Fault, site: Site) -> None:
        site.link.unreadable = fault.amount
        self._later(self.scheduler.time + fault.for_s, lambda: setattr(site.link, "unreadable", 0.0))

    def _damage(self, fault: Fault, site: Site) -> None:
        """The payloads that it puts arrive damaged, or not at all."""
        site.link.damage = int(fault.amount)
        self._later(self.scheduler.time + fault.for_s, lambda: setattr(site.link, "damage", None))

    def _corrupt(self, fault: Fault, site: Site) -> None:
        """A bit of a master that the site holds flips, before or after it was hashed; it must notice and stop."""
        process = site.process
        assert process is not None
        if process.watched and process.flip_bit(int(fault.amount)):
            self.coverage.branch("fault: corrupt, a bit flipped")

    def start_again(self, process: SiteProcess) -> None:
        """A process has found its master wrong and stopped: whoever runs the site starts it again."""
        self.coverage.branch("end: own master differed from the others'")
        site, saved = process.site, process.disk.checkpoints
        if site.process is process and not site.is_gone:
            self._later(self.scheduler.time + 1.0, lambda: self._start(site, saved[-1] if saved else None))

    # --- the run ----------------------------------------------------------------------------------------------------

    def look_for_end(self) -> None:
        """Called when a process has ended or a planned act is done: stop once nothing more will happen."""
        running = any(site.process is not None and site.process.is_running for site in self.sites.values())
        if not running and not self._pending:
            self.scheduler.is_stopped = True

    def _round_s(self) -> float:
        """Virtual time within which a round of one fragment closes when nothing goes wrong, at its worst."""
        terms = self.terms
        slowest = max(site.step_s / min(site.skew, 1.0) for site in self.sites.values())
        upload = max(site.link.upload_s for site in self.sites.values())
        return terms.steps_per_turn * slowest + upload + terms.grace_s * 2 + 5

    def _limit_s(self) -> float:
        """Virtual time by which the run must be over, all faults healed: each round may need each time-out once."""
        terms = self.terms
        return (terms.rounds + 2) * terms.fragments * self._round_s() + 4 * terms.liveness_s + PATIENCE_S

    def play(self) -> Result:
        World.playing = self
        with listening(self.coverage):
            while True:
                limit, healed_at = self._limit_s(), self._healed_at  # later faults may be planned while it runs
                self.scheduler.run(healed_at + limit, MOST_EVENTS)
                if self._healed_at == healed_at or self.scheduler.is_stopped:
                    break
            self._check_end(limit)
            for site in self.sites.values():
                if site.process is not None:
                    site.process.process.kill()
        return Result(
            self.plan,
            self.scheduler.events(),
            self.scheduler.time,
            tuple(self.invariants.violations),
            dict(self.coverage.branches),
            tuple(self.log or ()),
        )

    def _check_end(self, limit: float) -> None:
        invariants = self.invariants
        for line in self.coverage.forbidden:
            invariants.violate(f"logged: {line}")
        running = [site for site in self.sites.values() if site.process is not None and site.process.is_running]
        if not invariants.violations and running:
            joined = [site.process for site in running if site.process is not None and site.process.watched]
            at = {process.site.name: process.outer._courier.versions() for process in joined}
            invariants.violate(f"deadlock: {len(running)} sites still run {limit:.0f} s after the last fault: {at}")
        for site in self.sites.values():
            for what, times in site.link.hits.items():
                self.coverage.branches[f"request: {what}"] += times
        try:
            invariants.check_log()
        except ComposerPrimeError as error:
            invariants.violate(f"the log can't be rebuilt: {error}")
        if keys.close() not in self.bucket.objects:
            self.coverage.branch("end: without a close record")

    def first_master_sha(self, fragment: int) -> str:
        return Manifest.from_bytes(self.bucket.objects[keys.manifest()], keys.manifest()).masters[fragment]


def run_plan(plan: Plan, *, record: bool = False) -> Result:
    """Play a plan to its end."""
    return World(plan, record=record).play()


def run_seed(seed: int, *, record: bool = False) -> Result:
    """Play the plan of a seed."""
    return run_plan(draw_plan(seed), record=record)
