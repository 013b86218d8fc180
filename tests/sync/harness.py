"""Sites for tests of the outer loop: couriers on a hand-driven clock, and whole sites on threads."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import nn

from composer_prime.errors import Superseded
from composer_prime.outer.fragments import trainable
from composer_prime.store.base import Store
from composer_prime.sync.courier import Courier
from composer_prime.sync.members import Members, Pulse, claim_incarnation
from composer_prime.sync.records import Terms
from composer_prime.sync.replica import Replica
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.start import create_or_join
from composer_prime.sync.tape import Tape


def make_terms(**changes: Any) -> Terms:
    """Terms for a quick run; name what a test cares about."""
    values: dict[str, Any] = {
        "inner_steps": 4,
        "fragments": 2,
        "sync_delay": 0,
        "merge_alpha": 0.0,
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


def make_net(seed: int = 0) -> nn.Module:
    """A model of two blocks and 109 parameters, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3, bias=True))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return net


class HandExecutor(Executor):
    """Runs what was submitted only when told to: an upload that takes as long as a test wants."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        """Do everything that waits."""
        while self.waiting:
            future, call = self.waiting.pop(0)
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


class HandClock:
    """A monotonic clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class HandSite:
    """A courier without threads or a trainer: a test calls `tick` and hands over captures itself."""

    def __init__(self, store: Store, terms: Terms, name: str, clock: HandClock, *, seed: int = 0) -> None:
        params = dict(trainable(make_net(seed).named_parameters()))
        self.manifest, self.manifest_sha, self.fragments = create_or_join(store, terms, "run", name, params)
        self.name = name
        self.incarnation = claim_incarnation(store, name)
        self.uploads = HandExecutor()
        self.pulse = Pulse(store, name, self.incarnation)
        self.members = Members(store, terms.liveness_s)
        self.replicas = [
            Replica(store, self.manifest, self.manifest_sha, fragment.index, fragment.numel)
            for fragment in self.fragments
        ]
        self.tape = Tape(store, name, self.incarnation)
        self.courier = Courier(
            store=store,
            manifest=self.manifest,
            replicas=self.replicas,
            members=self.members,
            tape=self.tape,
            site=name,
            incarnation=self.incarnation,
            uploads=self.uploads,
            clock=clock,
        )
        self.courier.follow()
        self.beat()

    def beat(self) -> None:
        """Be seen as live."""
        self.pulse.beat("live", self.courier.versions(), 0, 0)

    def tick(self, times: int = 1) -> None:
        """Upload what waits, then make passes."""
        self.uploads.run()
        for _ in range(times):
            self.courier.tick()


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
        stop_after: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.name = name
        self.net = make_net(seed)
        self.outer = OuterLoop(store, terms, run="run", site=name)
        self.steps = 0
        self.summary: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.after_join: Callable[[], object] = lambda: None
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
        if hasattr(self.outer, "_thread"):
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


def run_sites(*sites: ThreadSite, timeout_s: float = 60) -> None:
    """Start the sites, wait for all, and raise what any of them raised."""
    for site in sites:
        site.start()
    for site in sites:
        site.join(timeout_s)
        assert not site.is_alive(), f"site {site.name} hangs at versions {site.outer._courier.versions()}"
    for site in sites:
        if site.error is not None:
            raise site.error
