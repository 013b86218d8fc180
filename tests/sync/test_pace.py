"""What a site does at once, how often it looks into the bucket, and how long its training waits."""

import threading

import pytest
import torch
from torch import nn

from composer_prime.errors import StoreError
from composer_prime.outer.fragments import trainable
from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.driver import BUSY_POLL_S, IDLE_POLL_S, OPEN_POLL_S, Driver
from composer_prime.sync.entering import SiteIdentity, enter
from composer_prime.sync.errands import Capture, Errand
from composer_prime.sync.learning import Present
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Beat
from composer_prime.sync.runtime import PARALLEL_BODIES, ThreadRuntime, side_by_side
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.start import Founding, create_or_join
from composer_prime.sync.tape import Tape
from tests.crowd import Crowd
from tests.patience import PATIENCE_S, wait_until
from tests.sync.harness import HandSite, make_net, make_terms


def test_parallel_requests_keep_their_order_and_raise_the_first_error_when_all_have_ended():
    runtime, done = ThreadRuntime(), []

    def half(number: int) -> float:
        done.append(number)
        return 1 / number

    assert runtime.map(half, [1, 2, 4]) == [1.0, 0.5, 0.25]
    done.clear()
    with pytest.raises(ZeroDivisionError):
        runtime.map(half, [1, 0, 2, 4])
    assert sorted(done) == [0, 1, 2, 4]
    runtime.close()


def test_sixteen_requests_of_a_site_are_under_way_at_once_and_no_more():
    runtime, crowd = ThreadRuntime(), Crowd(16)
    try:
        runtime.map(lambda number: crowd.visit(), range(64))
    finally:
        runtime.close()
    assert crowd.most == 16


def test_bodies_side_by_side_may_map_and_the_first_error_is_raised_once_all_have_ended():
    runtime, done, meet = ThreadRuntime(), [], threading.Barrier(2)

    def body() -> None:
        meet.wait(PATIENCE_S)
        done.append(sum(runtime.map(lambda number: number, range(40))))

    def failing() -> None:
        meet.wait(PATIENCE_S)
        raise StoreError("on cue")

    try:
        with pytest.raises(StoreError, match="on cue"):
            side_by_side(runtime, "test", [body, failing])
        assert done == [780]
        side_by_side(runtime, "test", [])
    finally:
        runtime.close()


def test_eight_bodies_run_side_by_side_and_no_more():
    crowd = Crowd(8)
    side_by_side(ThreadRuntime(), "test", [crowd.visit] * 20)
    assert crowd.most == 8


class HeldUploads(MemoryStore):
    """Payloads wait on their way, as over a slow link, until the gate is open; so many are waited for first."""

    def __init__(self, name: str, num_at_once: int = 1) -> None:
        super().__init__(name)
        self.gate, self.crowd = threading.Event(), Crowd(num_at_once)

    def put(self, key: str, data: bytes | memoryview) -> None:
        if keys.is_payload(key):
            self.crowd.visit()
            assert self.gate.wait(PATIENCE_S)
        super().put(key, data)


def test_a_site_goes_on_looking_at_the_bucket_while_all_its_fragments_are_being_uploaded(request):
    store, runtime = HeldUploads(request.node.name, PARALLEL_BODIES), ThreadRuntime()
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    params = LocalParameters(dict(trainable(net.named_parameters())))
    run = create_or_join(store, make_terms(fragments=20, inner_steps=20), "run", "a", params, runtime, Founding())
    courier = Present(store, enter(store, run, SiteIdentity("a"), runtime), runtime=runtime).read()
    try:
        for fragment in run.fragments:
            local = torch.randn(fragment.numel)
            courier.submit(Capture(fragment.index, torch.zeros_like(local), local, None, 10, 1, 10))
        looking = threading.Thread(target=courier.tick, daemon=True)
        looking.start()
        looking.join(PATIENCE_S)
        assert not looking.is_alive()
    finally:
        store.gate.set()
        courier.finish()
        runtime.close()
    courier.tick()
    assert len([key for key in store.list("rounds/") if keys.is_offer(key)]) == 20
    assert store.crowd.most == PARALLEL_BODIES


# --- how often it looks ----------------------------------------------------------------------------------------------


def driver_of(site: HandSite) -> Driver:
    tape = Tape(site.store, site.name, site.incarnation)
    driver = Driver(site.courier, site.pulse, tape, runtime=site.runtime, beat_every_s=5.0, progress=lambda: (0, 0))
    driver.awaited = True
    return driver


def test_a_site_looks_seldom_until_its_own_upload_has_come_and_often_then(store, clock):
    a, b = HandSite(store, make_terms(quorum=2), "a", clock), HandSite(store, make_terms(quorum=2), "b", clock)
    driver = driver_of(a)
    assert driver._patience_s(0.0) == IDLE_POLL_S
    b.hand_over(0, 1.0)
    b.tick()  # its offer stands: without one of a's own the round stays open all the same
    a.hand_over(0, 2.0)
    a.courier.tick()
    assert store.list(keys.offers_prefix(0, 0))
    assert driver._patience_s(0.0) == OPEN_POLL_S
    a.runtime.run_tasks()
    assert driver._patience_s(0.0) == BUSY_POLL_S
    a.courier.tick()
    assert a.courier.versions() == (1, 0)


def test_one_offer_that_stands_is_watched_while_another_fragments_upload_goes_on(store, clock):
    a = HandSite(store, make_terms(quorum=2), "a", clock)
    a.hand_over(0, 1.0)
    a.tick()
    a.hand_over(1, 1.0)
    assert driver_of(a)._patience_s(0.0) == BUSY_POLL_S


def test_a_beat_that_is_late_on_its_way_does_not_overwrite_the_word_that_a_site_leaves(store, clock):
    held, gate = threading.Event(), threading.Event()

    class Late(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            if keys.is_beat(key) and not held.is_set() and threading.current_thread().name == "beating":
                held.set()
                assert gate.wait(PATIENCE_S)
            super().put(key, data)

    driver = driver_of(HandSite(Late(store.uri.removeprefix("memory://")), make_terms(), "a", clock))
    driver._state = "live"
    beating = threading.Thread(target=driver._try_beat, name="beating", daemon=True)
    beating.start()
    assert held.wait(PATIENCE_S)
    leaving = threading.Thread(target=driver.announce, args=["leaving"], daemon=True)
    leaving.start()
    leaving.join(0.2)
    gate.set()
    for thread in (beating, leaving):
        thread.join(PATIENCE_S)
    assert read_record(store, Beat, keys.beat("a", 0)).state == "leaving"


# --- in the midst of a pass ------------------------------------------------------------------------------------------


def test_a_capture_that_is_handed_over_in_the_midst_of_a_pass_stops_nobody(store, clock):
    a = HandSite(store, make_terms(), "a", clock)

    class Turning(Errand):
        """While it is looked at, the training thread takes its turn with the other fragment."""

        @property
        def offered_at(self) -> int | None:
            if 1 not in a.courier._errands:
                a.hand_over(1, 1.0)
            return None

        @offered_at.setter
        def offered_at(self, version: int | None) -> None:
            pass

    a.courier._errands[0] = Turning(Capture(0, None, None, None, 0, 0, 0), 0)
    assert a.courier._served() == [] and set(a.courier._errands) == {0, 1}
    a.courier.tick()


# --- rule 8: an exchange runs beside the training --------------------------------------------------------------------


HELD_S = 0.4


class HandClock(ThreadRuntime):
    """Threads, on a clock that moves when told to."""

    time_s = 0.0

    def now(self) -> float:
        return self.time_s


@pytest.mark.parametrize("sync_delay", [0, 1, 3])
def test_training_goes_on_for_tau_steps_of_an_upload_then_waits_and_says_for_how_long(request, sync_delay):
    store = HeldUploads(request.node.name)
    terms = make_terms(fragments=1, inner_steps=4, sync_delay=sync_delay, rounds=3)
    runtime = HandClock()
    outer, net = OuterLoop(store, terms, run="run", site="a", runtime=runtime), make_net()
    outer.join(net.named_parameters())
    try:
        for _ in range(3 + sync_delay):  # the fragment is due at step 4
            report = outer.after_inner_step(10, 1)
            assert not report.adopted and not store.gate.is_set()
        before_s = outer.summary()["stall_s"]

        def end_the_upload() -> None:
            wait_until(lambda: outer._driver.awaited)
            runtime.time_s = HELD_S
            store.gate.set()

        threading.Thread(target=end_the_upload).start()
        report = outer.after_inner_step(10, 1)
        assert store.gate.is_set() and report.adopted == (0,)
        assert report.stall_s == HELD_S
        assert outer.summary()["stall_s"] == pytest.approx(before_s + report.stall_s)
        assert before_s == 0, "steps in which nothing is waited for take no time"
    finally:
        store.gate.set()
        outer.close()
