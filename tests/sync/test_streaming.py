"""Rule 8: a fragment's exchange runs beside the training, which waits when tau is used up, and that is measured."""

import threading

import pytest

from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.site_clock import OuterLoop
from tests.patience import PATIENCE_S, wait_until
from tests.sync.harness import make_net, make_terms

HELD_S = 0.4


class HandClock(ThreadRuntime):
    """Threads, on a clock that moves when told to."""

    time_s = 0.0

    def now(self) -> float:
        return self.time_s


class Held(MemoryStore):
    """Payloads wait on their way, as over a slow link, until the gate is open."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate = threading.Event()

    def put(self, key: str, data: bytes | memoryview) -> None:
        if keys.is_payload(key):
            assert self.gate.wait(PATIENCE_S)
        super().put(key, data)


@pytest.mark.parametrize("sync_delay", [0, 1, 3])
def test_training_goes_on_for_tau_steps_of_an_upload_then_waits_and_says_for_how_long(request, sync_delay):
    store = Held(request.node.name)
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
