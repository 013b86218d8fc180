"""Ten sites in one process and one virtual clock, seven honest and three hostile, for thousands of judged offers.

The couriers, records, signatures and checks are those of real sites; what is left out is training: an honest site
moves a small vector towards a common goal, which moves on, with noise of its own.
"""

import contextlib
import random
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from composer_prime.errors import SiteError
from composer_prime.store import open_store
from composer_prime.store.base import Store
from composer_prime.sync.entering import SiteIdentity, enter
from composer_prime.sync.errands import Capture
from composer_prime.sync.learning import Present
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.runtime import Condition
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding, create_or_join
from composer_prime.sync.terms import Terms
from tests.bench.adversaries.audit import Audit, audit
from tests.bench.adversaries.site import HostileSite

HOSTILE_NAMES = ("0-eve", "d-eve", "z-eve", "y-eve")
"""Before, among and after the honest names: in which order names stand must help nobody."""
PASS_S = 0.25
"""Virtual seconds between two passes of a site."""
MOST_PASSES = 400
"""Passes in which a round must close; more mean that it hangs."""
OVERWRITE_S = 0.3
"""Virtual seconds after which a second offer is put over the first."""
NOISE = 1.0
PULL = 0.3
DRIFT = 0.3
"""How far the goal moves on in a round: what sites have in common as long as they train, in units of their noise."""


@dataclass(frozen=True)
class CrowdPlan:
    """One run of the crowd.

    codec, aggregate   of its rounds
    gather_sites       rounds that take more offers are cut into parts
    rounds             training rounds of its one fragment
    """

    codec: str
    aggregate: str
    honest: int = 7
    hostile: int = 3
    rounds: int = 100
    seed: int = 0
    gather_sites: int = 16

    @property
    def title(self) -> str:
        """The rule by which it merges."""
        cut = f"in parts above {self.gather_sites} offers" if self._is_cut else "gathered"
        return f"{self.codec}, {self.aggregate}, {cut}"

    @property
    def _is_cut(self) -> bool:
        return self.gather_sites < self.honest

    @property
    def numel(self) -> int:
        """Parameters; enough for payloads of over 64 bytes, since smaller ones are not compared with each other."""
        return 8192 if self.codec == "topk" else 4096 if self._is_cut else 1024

    @property
    def terms(self) -> Terms:
        """The run's terms."""
        return Terms.model_validate(
            {
                "inner_steps": 1,
                "fragments": 1,
                "sync_delay": 0,
                "lr": 1.0,
                "momentum": 0.0,
                "codec": self.codec,
                "weighting": "equal",
                "aggregate": self.aggregate,
                "gather_sites": self.gather_sites,
                "slices": 16 if self._is_cut else 2,
                "quorum": 1,
                "grace_s": 2.0,
                "liveness_s": 20.0,
                "max_stale_rounds": 8,
                "snapshot_rounds": 10**6,
                "rounds": self.rounds,
            }
        )


def judge_crowd(plan: CrowdPlan) -> Audit:
    """Play a whole run and audit it. Raises SiteError when a round doesn't close."""
    name = f"memory://adversaries-{uuid.uuid4().hex}"
    store = open_store(name)
    try:
        crowd = Crowd(store, plan)
        crowd.play()
        return audit(store, crowd.honest_names, crowd.deeds())
    finally:
        for key in store.list(""):
            store.delete(key)


class Crowd:
    """Honest and hostile sites of one run, driven in turns, each turn in another order."""

    def __init__(self, store: Store, plan: CrowdPlan) -> None:
        self._plan, self._clock = plan, _Clock()
        self.honest_names = [chr(ord("a") + index) for index in range(plan.honest)]
        hostile_names = HOSTILE_NAMES[: plan.hostile]
        signing = {name: SigningKey.generate() for name in (*self.honest_names, *hostile_names)}
        founding = Founding(keys={name: key.public for name, key in signing.items()})
        self._random = random.Random(plan.seed)
        self.honest = [
            _HonestSite(store, plan, name, signing[name], founding, self._clock) for name in self.honest_names
        ]
        self.hostile = [
            HostileSite(
                store,
                name,
                signing[name],
                honest=self.honest_names,
                runtime=self._clock,
                first_kind=4 * index + plan.seed,
                seed=plan.seed,
                overwrite_s=OVERWRITE_S,
            )
            for index, name in enumerate(hostile_names)
        ]

    def play(self) -> None:
        """All rounds, the closing one included."""
        for version in range(self._plan.terms.final_version):
            for site in self.honest:
                site.offer(version)
            self._close(version)
        for site in self.honest:
            site.leave()

    def deeds(self) -> list[Any]:
        """What the adversaries did, all together."""
        return [deed for site in self.hostile for deed in site.book]

    def _close(self, version: int) -> None:
        """Pass after pass until all honest sites are past the round."""
        turns: list[Callable[[], None]] = [*(site.act for site in self.honest), *(site.act for site in self.hostile)]
        for number in range(MOST_PASSES):
            if number % 4 == 0:
                for site in self.honest:
                    site.beat()
                for site in self.hostile:
                    site.beat("live")
            self._random.shuffle(turns)
            for turn in turns:
                turn()
            self._clock.seconds += PASS_S
            if all(site.version > version for site in self.honest):
                return
        raise SiteError(f"round {version} of {self._plan} didn't close in {MOST_PASSES} passes")


class _HonestSite:
    """A courier with work to offer in every round."""

    def __init__(
        self, store: Store, plan: CrowdPlan, name: str, key: SigningKey, founding: Founding, clock: "_Clock"
    ) -> None:
        params = LocalParameters({"weight": torch.zeros(plan.numel)})
        self._run = create_or_join(store, plan.terms, "crowd", name, params, clock, founding)
        entered = enter(store, self._run, SiteIdentity(name, key), clock)
        self._pulse, self._tape = entered.pulse, entered.tape
        self._courier = Present(store, entered, runtime=clock).read()
        self._random = torch.Generator().manual_seed(hash((plan.seed, ord(name))))
        common = torch.Generator().manual_seed(plan.seed)
        self._goal, self._drift = (torch.randn(plan.numel, generator=common) * far for far in (10, DRIFT))
        self._trained = 0
        self.beat()

    @property
    def version(self) -> int:
        """The round that is open, as this site knows."""
        return self._courier.versions()[0]

    def beat(self) -> None:
        self._pulse.beat("live", self._courier.versions(), self._courier.pins(), 0, self._trained)

    def offer(self, version: int) -> None:
        """Hand over this round's movement, once the last one's fate is known."""
        master, _ = self._courier.collect(0)
        noise = torch.randn(master.weights.numel(), generator=self._random) * NOISE
        self._trained += 10
        movement = PULL * (master.weights - self._goal - version * self._drift) + noise
        self._courier.submit(Capture(0, movement, torch.zeros_like(movement), None, 10, 1, self._trained))

    def act(self) -> None:
        """One pass over the bucket."""
        self._courier.tick()

    def leave(self) -> None:
        """Wait for what is under way, and write the tape out."""
        self._courier.finish()
        self._tape.flush()


class _Done:
    """A task that was done before its starter went on."""

    def join(self, timeout: float | None = None) -> None:
        """There is nothing to wait for."""

    def is_alive(self) -> bool:
        return False


class _Clock:
    """A runtime on the caller's thread: tasks are done where they are spawned, and time moves when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def lock(self) -> contextlib.AbstractContextManager[object]:
        return threading.RLock()

    def condition(self) -> Condition:
        return threading.Condition()

    def spawn(self, name: str, body: Callable[[], None]) -> _Done:
        body()
        return _Done()

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [function(item) for item in items]

    def close(self) -> None:
        """Nothing to let go of."""


RULES = ({}, {"codec": "topk"}, {"gather_sites": 4})
"""What the crowd's runs have other than int8 and all offers of a round gathered."""


def crowd_plans(honest_offers: int, honest: int, hostile: int, rounds: int = 100) -> Sequence[CrowdPlan]:
    """Runs in which at least so many honest offers are judged: of each rule in turn, each with a seed of its own."""
    num_runs = max(-(-honest_offers // (honest * rounds)), len(RULES))
    whole = CrowdPlan("int8", "clipped", honest, hostile, rounds)
    return [replace(whole, seed=seed, **RULES[seed % len(RULES)]) for seed in range(num_runs)]
