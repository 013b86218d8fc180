"""The watchdog over sites whose beats go on: what stands still is ended, what waits for others isn't."""

import threading
from collections.abc import Callable, Iterator

import pytest

from composer_prime.launch.budget import Limits
from composer_prime.launch.supervisor import Pulses
from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Beat
from tests.executors.launches import Scene
from tests.patience import PATIENCE_S
from tests.sync.harness import ThreadSite, make_terms

LIMIT_S = 100.0


class Watched:
    """A launch of the sites a and b under a supervisor; `look` beats, moves the time on, and takes a turn."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.scene = Scene(limits=limits or Limits(max_restarts=2, hang_after_s=None, stall_after_s=LIMIT_S))
        self.counter = 0
        self.supervisor = self.scene.supervisor()
        self.supervisor.turn()

    def look(self, seconds: float, step: int, *, state: str = "live", versions: tuple[int, ...] = (0, 0)) -> None:
        """a's beat says the step, b's goes on."""
        self.counter += 1
        self.scene.ticks += seconds
        for site, inner_step in (("a", step), ("b", self.counter)):
            record = Beat(
                site=site,
                incarnation=0,
                counter=self.counter,
                state=state,  # type: ignore[arg-type]
                versions=versions,
                inner_step=inner_step,
                trained_tokens=0,
                pins=versions,
            )
            self.scene.store.put(keys.beat(site, 0), record.to_bytes())
        self.supervisor.turn()

    def step_twice(self) -> None:
        """After which a has been seen to train."""
        for step in (0, 1, 2):
            self.look(1.0, step)

    @property
    def ended(self) -> list[str]:
        return self.scene.platform.cancelled

    @property
    def jobs(self) -> list[str]:
        return sorted(self.scene.platform.jobs)


def test_a_replica_that_beats_on_and_makes_no_step_is_ended_and_started_anew() -> None:
    watched = Watched()
    watched.step_twice()
    watched.look(LIMIT_S - 1, 2)
    assert watched.ended == []
    watched.look(2.0, 2)
    assert watched.ended == [watched.scene.job_id("a", 1)]
    watched.look(1.0, 2)
    assert watched.scene.job_id("a", 2) in watched.jobs
    assert any("no inner step for 101 s" in line and "launch.stall_after_s" in line for line in watched.scene.said)


def test_a_replica_that_waits_with_its_offer_out_is_left_alone_and_has_its_time_once_the_round_has_closed() -> None:
    watched = Watched()
    watched.step_twice()
    watched.scene.store.create(keys.offer(1, 0, "a"), b"offer")
    for _ in range(5):
        watched.look(LIMIT_S, 2)
    watched.scene.store.create(keys.commit(1, 0), b"commit")
    watched.look(LIMIT_S, 2, versions=(0, 1))
    watched.look(LIMIT_S - 1, 2, versions=(0, 1))
    assert watched.ended == []
    watched.look(2.0, 2, versions=(0, 1))
    assert watched.ended == [watched.scene.job_id("a", 1)]


def test_others_that_go_on_dont_hide_a_replica_that_stands_still() -> None:
    watched = Watched()
    watched.step_twice()
    watched.scene.store.create(keys.offer(0, 0, "b"), b"offer")
    for version in (1, 2, 3):
        watched.scene.store.create(keys.commit(0, version - 1), b"commit")
        watched.look(LIMIT_S / 2, 2, versions=(version, 0))
    assert watched.ended == [watched.scene.job_id("a", 1)]


def test_the_first_step_has_four_times_as_long() -> None:
    watched = Watched()
    watched.look(0.0, 0)
    watched.look(1.0, 0)
    watched.look(4 * LIMIT_S - 1, 0)
    assert watched.ended == []
    watched.look(2.0, 0)
    assert watched.ended == [watched.scene.job_id("a", 1)]


@pytest.mark.parametrize("state", ["done", "leaving"])
def test_a_replica_that_ends_waits_for_the_others_as_long_as_they_take(state: str) -> None:
    watched = Watched()
    watched.step_twice()
    for _ in range(3):
        watched.look(LIMIT_S * 10, 2, state=state)
    assert watched.ended == []


def test_without_the_limit_no_replica_that_beats_is_ended() -> None:
    watched = Watched(Limits(stall_after_s=None))
    watched.step_twice()
    watched.look(1e6, 2)
    assert watched.ended == []


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for it, at most half a minute."""
    waiting = threading.Event()
    for _ in range(600):
        if holds():
            return
        waiting.wait(0.05)
    raise AssertionError(f"not within 30 s: {what}")


def test_of_two_real_sites_the_one_whose_training_hangs_is_told_from_the_one_that_waits_for_it(
    release: threading.Event,
) -> None:
    store, terms = MemoryStore("pulses"), make_terms(quorum=2, liveness_s=1.0, rounds=1)
    waiting, hanging = ThreadSite(store, terms, "a"), ThreadSite(store, terms, "b", data_seed=1)
    step = hanging.step
    hanging.step = lambda: (release.wait(PATIENCE_S), step())[1] if hanging.steps == 1 else step()  # type: ignore[method-assign]
    for site in (waiting, hanging):
        site.start()
    pulses, ticks = Pulses(store), 0.0
    until(lambda: keys.offer(0, 0, "a") in store.list(keys.offers_prefix(0, 0)), "a has offered")
    until(lambda: (beat := find_record(store, Beat, keys.beat("b", 0))) is not None and beat.inner_step == 1, "b hangs")
    hung_since: float | None = None

    def seen_again() -> bool:
        """Another look; whether either has beaten five times since b was seen to stand."""
        nonlocal ticks, hung_since
        ticks += 1.0
        for site in ("a", "b"):
            pulses.observe(site, 1, ticks)
        found = pulses.known["b"]
        hung_since = hung_since or found.stood_since
        beats = [pulses.known[site].changed_at for site in ("a", "b")]
        return hung_since is not None and all(at is not None and at > hung_since + 20 for at in beats)

    until(seen_again, "beats go on")
    a, b = pulses.known["a"], pulses.known["b"]
    assert a.stood_since == a.changed_at, "it waits with its offer out"
    assert b.stood_since == hung_since and b.changed_at != b.stood_since, "it beats on and stands"
    release.set()
    for site in (waiting, hanging):
        site.join(PATIENCE_S)
        assert site.error is None and not site.is_alive()
