"""A simulated site: a process that trains a few numbers through the real `OuterLoop`, and a disk that outlives it.

Inner steps move a coordinate of the site's own by exactly UNIT for each token, so that what a commit took can be
counted in the masters themselves.
"""

import contextlib
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from composer_prime.errors import ConfigError, MasterMismatch, StoreError, Superseded
from composer_prime.sync.journal import KEPT
from composer_prime.sync.site_clock import OuterLoop, SiteIdentity
from tests.simulation.runtime import Process, SimRuntime
from tests.simulation.store import Link, SimStore

if TYPE_CHECKING:
    from tests.simulation.world import World

UNIT = 2.0**-6
"""How far one token moves its site's own coordinate."""
NUM_CHECKPOINTS = 4


class SimJournal:
    """`composer_prime.sync.journal.Journal` in memory."""

    def __init__(self) -> None:
        self._entries: dict[int, dict[str, Tensor]] = {}

    def write(self, fragment: int, payload: str, residual: Tensor) -> None:
        entries = self._entries.setdefault(fragment, {})
        entries.pop(payload, None)
        entries[payload] = residual.clone()
        while len(entries) > KEPT:
            del entries[next(iter(entries))]

    def read(self, fragment: int, payload: str) -> Tensor | None:
        found = self._entries.get(fragment, {}).get(payload)
        return None if found is None else found.clone()

    def copy(self) -> "SimJournal":
        other = SimJournal()
        other._entries = {fragment: dict(entries) for fragment, entries in self._entries.items()}
        return other


@dataclass(frozen=True)
class Checkpoint:
    """Parameters and the outer loop's state after one inner step, and what the invariants knew by then.

    at_end   whether the run had ended, so that the books aren't up to date
    """

    arrays: tuple[np.ndarray, ...]
    outer: dict[str, Any]
    books: tuple[tuple[float, int], ...]
    at_end: bool

    def state(self) -> dict[str, Any]:
        return _cloned(self.outer)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(inner) for key, inner in value.items()}
    return [_cloned(inner) for inner in value] if isinstance(value, list) else value


@dataclass
class Disk:
    """What outlives a process: checkpoints, oldest first, and the journal."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    journal: SimJournal = field(default_factory=SimJournal)

    def copy(self) -> "Disk":
        return Disk(list(self.checkpoints), self.journal.copy())


@dataclass
class Site:
    """A name, its link and its disk. `process` is the newest of that name."""

    name: str
    index: int
    link: Link
    rng: random.Random
    step_s: float
    skew: float = 1.0
    disk: Disk = field(default_factory=Disk)
    process: "SiteProcess | None" = None
    num_processes: int = 0
    is_gone: bool = False
    most_trained: dict[int, int] = field(default_factory=dict)


class SiteProcess:
    """One process of a site, from its start to its end. `state` says how far it has come."""

    def __init__(self, world: "World", site: Site, checkpoint: Checkpoint | None) -> None:
        self.world = world
        self.site = site
        self.disk = site.disk
        self.checkpoint = checkpoint
        self.number = site.num_processes
        site.num_processes += 1
        offset_s = site.rng.random() * 1e5
        self.process = Process(world.scheduler, site.name, skew=site.skew, offset_s=offset_s)
        self.runtime = SimRuntime(self.process)
        self.state = "joining"
        self.joined_from_s = 0.0
        """When its last try to join began; it has read how long the run goes on since."""
        self.leaving = False
        self.steps = 0
        self.arrays: list[np.ndarray] = []
        self.outer: Any = None
        self.watched = False
        self.within_reach: list[int] = []
        self.learned: list[int] = []
        """Tokens of its inner steps as a learner."""
        self.seen: list[Any] = []
        self.books: list[Any] = []
        self.flipped: dict[int, int] = {}
        """Versions of the masters, by fragment, that a flipped bit made wrong here and that may be so still."""
        self.fiber = self.process.spawn(self._run)

    # --- what the world does to it ----------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self.state in ("joining", "training") and not self.process.is_dead

    def kill(self) -> None:
        self.process.kill()
        self.state = "killed"

    def leave(self) -> None:
        self.leaving = True
        if self.state == "training":
            self.outer.interrupt()

    def flip_bit(self, draw: int) -> bool:
        """Flip a bit that no token moves, in a master whose successor another commit will name; whether there is one.

        draw   which fragment and which bit of the mantissa; and, by its parity, before or after it was hashed
        """
        replica = self.outer._courier._replicas[draw // 2 % self.world.terms.fragments]
        master = replica.master
        bit = (replica.fragment, draw % 23)
        if master.version + 2 > self.world.terms.final_version or bit in self.world.flipped_bits:
            return False  # sites that are wrong in the same bit would be right together
        self.world.flipped_bits.add(bit)
        weights = master.weights.clone()
        weights.view(torch.int32)[self.world.plan.num_sites] ^= 1 << (draw % 23)
        replica.master = replace(master, weights=weights, known_sha=master.sha256 if draw % 2 else None)
        self.flipped[replica.fragment] = master.version
        return True

    # --- its main task ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        end = "failed"
        try:
            self._join()
            self._train()
            end = "finished" if self.outer.finished else "left"
        except Superseded:
            end = "superseded"
        except MasterMismatch as error:
            if not self.world.flipped_bits:
                self.world.invariants.failed(self, error)
        except Exception as error:
            self.world.invariants.failed(self, error)
        if self.state == "training":
            with contextlib.suppress(Superseded):
                self.outer.close()
        self.state = end
        if end == "finished":
            self.world.invariants.finished(self)
        if end == "failed" and self.world.flipped_bits:
            self.world.start_again(self)
        self.world.look_for_end()

    def _join(self) -> None:
        world, site = self.world, self.site
        while True:
            self._load()
            self.joined_from_s = world.scheduler.time
            store = SimStore(world.bucket, self.process, site.link, site.rng, world.log)
            store.before_request = self.watch
            named = [
                (f"layers.{index}.w", torch.from_numpy(array).requires_grad_())
                for index, array in enumerate(self.arrays)
            ]
            self.outer = OuterLoop(
                store,
                world.plan.terms,
                run="sim",
                site=SiteIdentity(site.name, world.keys.get(site.name)),
                founding=world.founding,
                journal=self.disk.journal,
                runtime=self.runtime,
            )
            if self.checkpoint is not None:
                self.outer.load_state_dict(self.checkpoint.state())
            within_reach = world.invariants.within_reach()
            try:
                self.outer.join(named)
            except StoreError:
                world.coverage.branch("join failed, tried again")
                self.process.wait(1 + 2 * site.rng.random())
                continue
            except ConfigError as error:
                if "may create it" not in str(error):
                    raise
                self.process.wait(5.0)
                continue
            break
        self.state = "training"
        self.within_reach = within_reach
        self._look_in()

    def _look_in(self) -> None:
        """Be watched from when this process stands on masters; a learner doesn't yet."""
        learner = self.outer._learner
        if learner is None and not self.watched:
            self.watched = True
            self.world.invariants.joined(self, self.within_reach)
        elif learner is not None:
            self.learned = learner.trained

    def _load(self) -> None:
        if self.checkpoint is not None:
            self.arrays = [array.copy() for array in self.checkpoint.arrays]
            return
        rng = np.random.default_rng(7 if self.world.plan.hasty else self.site.index * 1000 + self.number)
        self.arrays = [
            rng.standard_normal(self.world.plan.numel).astype(np.float32) for _ in range(self.world.plan.layers)
        ]

    def _train(self) -> None:
        world, site = self.world, self.site
        rng, process, outer = site.rng, self.process, self.outer
        arrays, own = self.arrays, site.index
        noise, other = world.plan.noise, world.plan.num_sites + 3
        while not outer.finished and not self.leaving:
            process.wait(site.step_s * (0.9 + 0.2 * rng.random()))
            tokens = 1 + int(rng.random() * 12)
            for array in arrays[: world.terms.fragments]:
                array[own] -= np.float32(tokens * UNIT)
                if noise:
                    array[other] -= np.float32((0.9 + 0.2 * rng.random()) * noise * tokens * UNIT)
            self.steps += 1
            world.invariants.trains(self, tokens)
            outer.after_inner_step(tokens, 1)
            self._look_in()
            if self.watched:
                world.invariants.stepped(self)
            if self.steps % world.plan.checkpoint_steps == 0 or self.leaving:
                self._save()

    def _save(self) -> None:
        books = tuple((book.offset, book.merged_offset) for book in self.books)
        arrays = tuple(array.copy() for array in self.arrays)
        self.disk.checkpoints.append(Checkpoint(arrays, _cloned(self.outer.state_dict()), books, self.outer.finished))
        del self.disk.checkpoints[:-NUM_CHECKPOINTS]

    # --- what the invariants look at --------------------------------------------------------------------------------

    def watch(self) -> None:
        """Show the masters that this process holds, where one is new; called before each of its requests."""
        if not self.watched:
            return
        masters = self.outer._courier._masters
        for index, master in enumerate(masters):
            if master is not self.seen[index]:
                self.seen[index] = master
                self.world.invariants.master(self, master)
