"""One answer that there is no such bucket, or no such run, ends no site that trains; one that stays does."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from composer_prime.errors import KeyMissing, PayloadLost, RunGone, StoreError, StoreUnusable
from composer_prime.store import Store, keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync import driver
from composer_prime.sync.learning import READING_S
from composer_prime.sync.site_clock import OuterLoop
from tests.simulation.runtime import Process, Scheduler, SimRuntime
from tests.sync.harness import HandSite, commit_of, make_net, make_terms, train_step

STEP_S = 5.0
ROUNDS = 40
TERMS = make_terms(rounds=ROUNDS, sync_delay=1, codec="int8", liveness_s=30.0)
NO_BUCKET = StoreUnusable("first contact failed: there is no bucket runs: make it or correct the URI")


class Denying:
    """A store that passes every call on, unless `says` has an error for (operation, key); it counts those."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner, self.num_denied = inner, 0
        self.says: Callable[[str, str], Exception | None] = lambda operation, key: None

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if not callable(call) or name == "close":
            return call

        def denied(key: str, *args: Any) -> Any:
            error = self.says(name, key)
            if error is not None:
                self.num_denied += 1
                raise error
            return call(key, *args)

        return denied

    def once(self, says: Callable[[str, str], Exception | None]) -> None:
        """Say it to the first request that it is meant for."""
        before = self.num_denied
        self.says = lambda operation, key: None if self.num_denied > before else says(operation, key)


def no_bucket(operation: str, key: str) -> Exception | None:
    return NO_BUCKET


def no_bucket_for(meant: Callable[[str], bool]) -> Callable[[str, str], Exception | None]:
    return lambda operation, key: NO_BUCKET if operation != "list" and meant(key) else None


def no_bucket_for_a_beat(operation: str, key: str) -> Exception | None:
    return NO_BUCKET if operation == "put" and keys.is_beat(key) else None


def no_manifest(operation: str, key: str) -> Exception | None:
    return KeyMissing(f"no object at {key}") if key == keys.manifest() else None


class VirtualSite:
    """A whole site that trains in virtual time, one inner step in `STEP_S`; `on_step` is called before each."""

    def __init__(
        self,
        store: Denying,
        on_step: Callable[[int], object] = lambda step: None,
        *,
        name: str = "a",
        net: nn.Module | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.name = name
        self.scheduler = scheduler or Scheduler()
        self.process = Process(self.scheduler, name)
        self.net = net or make_net()
        self.data = torch.Generator().manual_seed(0)
        self.outer = OuterLoop(cast(Store, store), TERMS, run="run", site=name, runtime=SimRuntime(self.process))
        self.on_join: Callable[[], object] = lambda: None
        self.on_step = on_step
        self.leaves = False
        self.steps = 0
        self.ended_at = 0.0
        self.summary: dict[str, Any] = {}

    def run(self) -> None:
        """To its end; raises what ended it."""
        self.start()
        self.scheduler.run(until=1e6, most_events=10**6)
        if self.process.error is not None:
            raise self.process.error

    def start(self, after_s: float = 0.0) -> None:
        """Be there when the scheduler runs, some time later."""
        self.process.spawn(lambda: (self.process.wait(after_s), self._train()))

    def _train(self) -> None:
        self.outer.join(self.net.named_parameters())
        try:
            self.on_join()
            while not (self.outer.finished or self.leaves):
                self.process.wait(STEP_S)
                self.steps += 1
                self.on_step(self.steps)
                train_step(self.net, self.data, lr=0.05)
                self.outer.after_inner_step(tokens=10, samples=1)
        finally:
            self.ended_at = self.scheduler.time
            self.summary = self.outer.summary()
            self.outer.close()


def events(store: MemoryStore, name: str, site: str = "a") -> list[dict[str, Any]]:
    lines = [line for key in store.list(keys.tape_prefix(site)) for line in store.get(key).splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.mark.parametrize(
    ("says", "logged", "told"),
    [
        pytest.param(no_manifest, "store_failed", ["RunGone"], id="manifest gone"),
        pytest.param(no_bucket_for(keys.manifest().__eq__), "store_failed", ["StoreUnusable"], id="look"),
        pytest.param(no_bucket_for(keys.is_payload), "store_failed", ["StoreUnusable"], id="upload"),
        pytest.param(no_bucket_for(keys.is_offer), "store_failed", ["StoreUnusable"], id="offer"),
        pytest.param(no_bucket_for_a_beat, "beat_failed", [], id="beat"),
        pytest.param(no_bucket_for(keys.is_master), "snapshot_failed", [], id="snapshot"),
    ],
)
def test_one_bad_word_midway_ends_no_site_and_is_told(store, caplog, says, logged, told):
    denying = Denying(store)
    site = VirtualSite(denying, lambda step: denying.once(says) if step == 20 else None)
    site.run()
    assert denying.num_denied == 1
    summary = site.outer.summary()
    assert [master["version"] for master in summary["masters"]] == [TERMS.final_version] * 2
    assert all(ledger["merged"] == ledger["trained"] == site.steps * 10 for ledger in summary["tokens"])
    warnings = [record.message.split()[0] for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [logged]
    assert [event["error"] for event in events(store, "denied")] == told


def test_a_word_that_comes_and_goes_ends_no_site_however_often(store):
    denying = Denying(store)

    def now_and_then(step: int) -> None:
        denying.once((no_bucket, no_manifest)[step % 2])

    site = VirtualSite(denying, now_and_then)
    site.run()
    assert site.outer.finished and denying.num_denied > driver.DENIED_PASSES


@pytest.mark.parametrize(
    ("says", "kind", "words"),
    [(no_bucket, StoreUnusable, "there is no bucket runs"), (no_manifest, RunGone, "no longer holds the run's manif")],
)
def test_a_word_that_stays_ends_the_site(store, says, kind, words):
    denying, began_at = Denying(store), 20 * STEP_S
    site = VirtualSite(denying, lambda step: setattr(denying, "says", says) if step == 20 else None)
    with pytest.raises(kind, match=words):
        site.run()
    assert driver.DENIED_S <= site.ended_at - began_at <= driver.DENIED_S + TERMS.liveness_s
    assert denying.num_denied > driver.DENIED_PASSES


def commit_of_another(store: MemoryStore, clock: list[float]) -> tuple[str, bytes]:
    """Site a makes the first round alone and is gone: the key and the bytes of the payload that its commit takes."""
    a = HandSite(store, TERMS, "a", clock)
    a.hand_over(0, 1.0)
    a.tick(times=2)
    payload = commit_of(store).taken[0].payload
    assert payload is not None and a.courier.versions() == (1, 0)
    return payload, store.get(payload)


@pytest.mark.parametrize("damage", ["missing", "other bytes"])
def test_a_payload_that_nobody_has_ends_a_site_with_a_line_that_names_it(store, clock, damage):
    payload, data = commit_of_another(store, clock)
    store.delete(payload)
    if damage == "other bytes":
        store.put(payload, bytes(len(data)))
    site = VirtualSite(Denying(store), name="b")
    with pytest.raises(PayloadLost) as told:
        site.run()
    for words in (payload, "round 0 of fragment 0", "site a", "restore it from a backup", "--resume"):
        assert words in str(told.value)
    assert told.value.exit_code == 2 and "\n" not in str(told.value)
    assert driver.DENIED_S <= site.ended_at <= driver.DENIED_S + TERMS.liveness_s


def test_a_payload_that_comes_back_in_time_ends_no_site(store, clock):
    payload, data = commit_of_another(store, clock)
    store.delete(payload)
    site = VirtualSite(Denying(store), name="b")
    site.on_join = lambda: site.scheduler.call_at(driver.DENIED_S - 5.0, lambda: store.put(payload, data))
    site.run()
    assert site.outer.finished


def test_an_outage_after_a_payload_was_missed_is_no_proof_that_nobody_has_it(store, clock):
    """Its site may be cut off as well, and puts it again when the store is back."""
    payload, data = commit_of_another(store, clock)
    store.delete(payload)
    denying = Denying(store)
    site = VirtualSite(denying, name="b")
    back_at = 5 * driver.DENIED_S

    def outage(operation: str, key: str) -> Exception | None:
        return StoreError("503") if 5.0 < site.scheduler.time < back_at else None

    denying.says = outage
    site.on_join = lambda: site.scheduler.call_at(back_at + 20.0, lambda: store.put(payload, data))
    site.run()
    assert site.outer.finished


def test_words_ten_minutes_apart_are_no_proof_while_they_are_few(store):
    """The machine has slept between them."""
    denying = Denying(store)
    site = VirtualSite(denying)
    woken_at: list[float] = []

    def around_a_sleep(operation: str, key: str) -> Exception | None:
        if no_manifest(operation, key) is None:
            return None
        now = site.scheduler.time
        if not woken_at:
            woken_at.append(now + 600)
            site.scheduler.call_at(now, site.process.pause)
            site.scheduler.call_at(now + 600, site.process.resume)
        elif now >= woken_at[0]:
            denying.says = lambda *_: None
        return no_manifest(operation, key)

    site.on_step = lambda step: setattr(denying, "says", around_a_sleep) if step == 20 else None
    site.run()
    assert site.outer.finished and 2 <= denying.num_denied < driver.DENIED_PASSES


def test_another_run_in_place_of_ours_is_not_taken_for_it(store):
    denying = Denying(store)
    site = VirtualSite(denying)

    def replace_the_run(step: int) -> None:
        if step == 20:
            manifest = store.get(keys.manifest())
            store.delete(keys.manifest())
            site.scheduler.call_at(site.scheduler.time + 20, lambda: store.put(keys.manifest(), manifest + b" "))

    site.on_step = replace_the_run
    with pytest.raises(RunGone):
        site.run()


def test_at_first_contact_one_word_ends_a_site(store):
    denying = Denying(store)
    denying.says = no_bucket
    site = VirtualSite(denying)
    with pytest.raises(StoreUnusable, match="there is no bucket runs"):
        site.run()
    assert denying.num_denied == 1 and site.scheduler.time < 1


def wide_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 1000), nn.Tanh(), nn.Linear(1000, 3))


def joiner(store: MemoryStore, seed: int) -> tuple[VirtualSite, Denying]:
    """Site b, about to join a run that site a has left midway; of seed 0 it holds the run's first weights."""
    first = VirtualSite(Denying(store), lambda step: setattr(first, "leaves", step == 20), net=wide_net(0))
    first.run()
    denying = Denying(store)
    return VirtualSite(denying, name="b", net=wide_net(seed)), denying


def test_one_bad_word_to_a_beat_beside_a_long_join_ends_no_site(store, caplog):
    (site, denying), beats = joiner(store, 1), []

    def slow_masters_and_the_second_beat(operation: str, key: str) -> Exception | None:
        if keys.is_master(key):
            site.process.wait(TERMS.liveness_s)
        elif no_bucket_for_a_beat(operation, key):
            beats.append(key)
            return NO_BUCKET if len(beats) == 2 else None
        return None

    denying.once(slow_masters_and_the_second_beat)
    site.run()
    assert site.outer.finished and denying.num_denied == 1
    assert caplog.messages.count(f"beat_failed error={NO_BUCKET}") == 1


def test_one_bad_word_to_a_learner_ends_no_site(store, caplog):
    site, denying = joiner(store, 0)

    def slow_masters(operation: str, key: str) -> Exception | None:
        if not keys.is_master(key) or site.outer.summary()["masters"]:
            return None
        site.process.wait(2 * READING_S)
        return None if denying.num_denied else NO_BUCKET

    denying.says = slow_masters
    site.run()
    assert denying.num_denied == 1 and site.outer.finished
    assert caplog.messages.count(f"store_failed retry_in_s=1.0 error={NO_BUCKET}") == 1
