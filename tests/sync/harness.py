"""Sites for tests of the outer loop: couriers on a hand-driven clock, and whole sites on threads."""

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from composer_prime.errors import Superseded
from composer_prime.outer.fragments import trainable
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.entering import SiteIdentity, enter
from composer_prime.sync.errands import Capture
from composer_prime.sync.journal import Journal
from composer_prime.sync.learning import Held, Present
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Commit, Offer
from composer_prime.sync.runtime import Condition, Task
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.start import Founding, create_or_join
from composer_prime.sync.terms import Terms
from composer_prime.sync.validity import write_commit
from tests.patience import PATIENCE_S


def make_terms(**changes: Any) -> Terms:
    """Terms for a quick run; name what a test cares about."""
    values: dict[str, Any] = {
        "inner_steps": 4,
        "fragments": 2,
        "sync_delay": 0,
        "lr": 1.0,
        "momentum": 0.0,
        "codec": "fp32",
        "weighting": "tokens",
        "quorum": 1,
        "grace_s": 30.0,
        "liveness_s": 60.0,
        "max_stale_rounds": 4,
        "snapshot_rounds": 2,
        "rounds": 3,
    }
    return Terms(**(values | changes))


def make_net(seed: int = 0, width: int = 12) -> nn.Module:
    """A model of two blocks, of 109 parameters or wider, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3, bias=True))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 * (12 / width) ** 0.5)
    return net


class HandTask:
    """A task that runs when told to."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.body: Callable[[], None] | None = body

    def run(self) -> None:
        body, self.body = self.body, None
        if body is not None:
            body()

    def join(self, timeout: float | None = None) -> None:
        self.run()

    def is_alive(self) -> bool:
        return self.body is not None


class HandRuntime:
    """A clock that moves when told to, and tasks that run when told to: an upload that takes as long as a test wants.

    Sites of one test share the clock (`HandRuntime(other.clock)`); everything runs on the test's own thread.
    """

    def __init__(self, clock: list[float] | None = None) -> None:
        self.clock = [0.0] if clock is None else clock
        self.tasks: list[HandTask] = []

    def now(self) -> float:
        return self.clock[0]

    def advance(self, seconds: float) -> None:
        self.clock[0] += seconds

    def lock(self) -> contextlib.AbstractContextManager[object]:
        return threading.RLock()

    def condition(self) -> Condition:
        return threading.Condition()

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        self.tasks.append(HandTask(body))
        return self.tasks[-1]

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [function(item) for item in items]

    def run_tasks(self) -> None:
        """Do everything that waits."""
        while self.tasks:
            self.tasks.pop(0).run()

    def close(self) -> None:
        """Nothing to let go of."""


KEYS = {name: SigningKey.from_bytes(name.encode() * 32) for name in "abcdegp"}
"""Of sites by name."""
OWNER = SigningKey.from_bytes(bytes(32))


def admitting(names: str, owner: SigningKey | None = None) -> Founding:
    """The founding of a run that admits these sites of one letter each."""
    return Founding(owner and owner.public, {name: KEYS[name].public for name in names})


def commit_of(store: Store, version: int = 0, fragment: int = 0) -> Commit:
    """The commit of a round."""
    return read_record(store, Commit, keys.commit(fragment, version))


def empty_commit(**fields: Any) -> Commit:
    """A commit of the first round that takes nothing, unsigned, but for `fields`; at least base_sha and previous."""
    plain = {
        "fragment": 0,
        "version": 0,
        "taken": (),
        "refused": (),
        "num_parts": 0,
        "committer": "a",
        "incarnation": 0,
    }
    return Commit(**(plain | fields))


class HandSite:
    """A courier without threads or a trainer: a test calls `tick` and hands over captures itself."""

    def __init__(
        self,
        store: Store,
        terms: Terms,
        name: str,
        clock: list[float],
        *,
        seed: int = 0,
        net: nn.Module | None = None,
        key: SigningKey | None = None,
        founding: Founding | None = None,
        journal: Journal | None = None,
        held: Held | None = None,
    ) -> None:
        params = LocalParameters(dict(trainable((net or make_net(seed)).named_parameters())))
        self.name = name
        self.store = store
        self.runtime = HandRuntime(clock)
        self.run = create_or_join(store, terms, "run", name, params, self.runtime, founding or Founding())
        identity = SiteIdentity(name, key)
        entered = enter(store, self.run, identity, self.runtime)
        self.roster, self.incarnation, self.pulse = entered.roster, entered.incarnation, entered.pulse
        self.courier = Present(store, entered, runtime=self.runtime, held=held, journal=journal).read()
        self.replicas = [self.courier.replica(index) for index in range(len(self.run.fragments))]
        self.trained = 0
        self.beat()

    def beat(self) -> None:
        """Be seen as live."""
        self.pulse.beat("live", self.courier.versions(), self.courier.pins(), 0, 0)

    def tick(self, times: int = 1) -> None:
        """Do the tasks that wait, then make passes."""
        self.runtime.run_tasks()
        for _ in range(times):
            self.courier.follow()
            self.courier.tick()

    def hand_over(self, fragment: int, values: Any, tokens: int = 10) -> None:
        """Submit a movement: fp32 values, or a number for all of them."""
        numel = self.run.fragments[fragment].numel
        self.trained += tokens
        movement = torch.full((numel,), float(values)) if not isinstance(values, torch.Tensor) else values
        self.courier.submit(Capture(fragment, movement, torch.zeros(numel), None, tokens, 1, self.trained))

    def offer(self, fragment: int, values: Any, tokens: int = 10) -> Offer:
        """Hand a movement over, and let its offer stand; nothing is closed."""
        self.hand_over(fragment, values, tokens)
        self.bring(fragment)
        return read_record(self.store, Offer, keys.offer(fragment, self.replicas[fragment].version, self.name))

    def bring(self, fragment: int = 0) -> None:
        """Let the offer of what was handed over stand."""
        self.runtime.run_tasks()
        self.courier._bring(fragment)

    def commit_taking(self, *offers: Offer, **changes: Any) -> Commit:
        """Its commit of the open round of fragment 0 on these offers, whatever they say, but for `changes`."""
        replica = self.replicas[0]
        commit = write_commit(
            facts=replica.coding.facts,
            version=replica.version,
            base_sha=replica.master.sha256,
            previous=replica.previous,
            take={offer.site: offer for offer in offers},
            refused={},
            voids=replica.history.voids,
            terms=self.run.terms,
            guests=(),
            admissions=0,
            admission_sha=None,
            committer=self.name,
            incarnation=0,
        ).model_copy(update=changes)
        assert self.store.create(keys.commit(0, replica.version), commit.to_bytes())
        return commit


def closing(clock: list[float], *sites: HandSite, passes: int = 4) -> None:
    """Tick everybody past the stagger, so that the round closes if it may."""
    for _ in range(passes):
        for site in sites:
            site.tick()
        clock[0] += 1.0


def beating(clock: list[float], *sites: HandSite, passes: int = 4, pause_s: float = 1.0) -> None:
    """The same, of sites that stay alive however long it takes."""
    for _ in range(passes):
        for site in sites:
            site.beat()
            site.tick()
        clock[0] += pause_s


class SpoilingStore(MemoryStore):
    """Opens the bytes of a store in memory anew; a site's payloads are cut short on their way while `spoils`.

    The site leaves commits to others, which look at what they take.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store.uri.removeprefix("memory://"))
        self.spoils = False

    def create(self, key: str, data: bytes) -> bool:
        return not key.endswith("/commit.json") and super().create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data[:-1] if self.spoils and keys.is_payload(key) else data)


class ThreadSite(threading.Thread):
    """A whole site: trains `make_net` by SGD on random regression until the run ends. `result` and `error` tell."""

    def __init__(
        self,
        store: Store,
        terms: Terms,
        name: str,
        *,
        seed: int = 0,
        data_seed: int = 0,
        lr: float = 0.05,
        width: int = 12,
        stop_after: int | None = None,
        state: dict[str, Any] | None = None,
        journal: Journal | None = None,
        key: SigningKey | None = None,
        founding: Founding | None = None,
        replace: bool = True,
    ) -> None:
        super().__init__(daemon=True)
        self.name = name
        self.net = make_net(seed, width)
        identity = SiteIdentity(name, key, replace)
        self.outer = OuterLoop(store, terms, run="run", site=identity, founding=founding, journal=journal)
        self.steps = 0
        self.summary: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.after_join: Callable[[], object] = lambda: None
        self.meeting = threading.Barrier(1)
        """Where sites wait for each other between joining and training, so that none ends the run alone."""
        self._lr = lr
        self._data = torch.Generator().manual_seed(data_seed)
        self._stop_after = stop_after
        self.saved: dict[str, Any] = {}
        if state is not None:
            self.net.load_state_dict(state["net"])
            self.outer.load_state_dict(state["outer"])

    def step(self) -> None:
        """One inner step of plain SGD."""
        train_step(self.net, self._data, self._lr)
        self.steps += 1

    def run(self) -> None:
        try:
            self.outer.join(self.net.named_parameters())
            with contextlib.suppress(threading.BrokenBarrierError):
                self.meeting.wait(PATIENCE_S)
            self.after_join()
            while not self.outer.finished and self.steps != self._stop_after:
                self.step()
                self.outer.after_inner_step(tokens=10, samples=2)
            self.saved = {
                "net": {name: value.clone() for name, value in self.net.state_dict().items()},
                "outer": self.outer.state_dict(),
            }
            self.summary = self.outer.summary()
        except BaseException as error:
            self.error = error
        finally:
            self._leave()

    def _leave(self) -> None:
        """Stop the site's threads, also after an error: one still in torch when Python ends would abort the tests."""
        self.meeting.abort()  # nobody waits for a site that couldn't join
        if hasattr(self.outer, "_driver"):
            with contextlib.suppress(Superseded):
                self.outer.close()


def train_step(net: nn.Module, data: torch.Generator, lr: float) -> None:
    """One step of SGD on a fixed linear map's outputs."""
    inputs = torch.randn(8, 4, generator=data)
    loss = ((net(inputs) - inputs[:, :3].cumsum(1)) ** 2).mean()
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter -= lr * parameter.grad


def start_together(*sites: ThreadSite) -> None:
    """Start the sites; they train once all have joined."""
    meeting = threading.Barrier(len(sites))
    for site in sites:
        site.meeting = meeting
        site.start()


def run_sites(*sites: ThreadSite, timeout_s: float = PATIENCE_S) -> None:
    """Start the sites together, wait for all, and raise what any of them raised."""
    start_together(*sites)
    for site in sites:
        site.join(timeout_s)
        assert not site.is_alive(), f"site {site.name} hangs at versions {site.outer._courier.versions()}"
    for site in sites:
        if site.error is not None:
            raise site.error


def shas(site: Any) -> list[str]:
    """The hashes of its masters, at its end."""
    return [master["sha256"] for master in site.summary["masters"]]


def assert_fates_add_up(site: Any) -> None:
    """Every token it trained was merged or, counted, dropped."""
    for ledger in site.summary["tokens"]:
        assert ledger["trained"] == site.steps * 10
        assert ledger["merged"] + ledger["dropped"] == ledger["trained"]
