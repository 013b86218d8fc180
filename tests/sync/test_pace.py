"""Sites of different speed, and how much they do at once."""

import threading

import pytest
import torch
from torch import nn

from composer_prime.errors import StoreError
from composer_prime.outer.fragments import trainable
from composer_prime.store import keys, open_store
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.entering import SiteIdentity, enter
from composer_prime.sync.errands import Capture
from composer_prime.sync.learning import Present
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.runtime import PARALLEL_BODIES, ThreadRuntime, side_by_side
from composer_prime.sync.start import Founding, create_or_join
from tests.crowd import Crowd
from tests.patience import PATIENCE_S
from tests.sync.harness import make_terms


@pytest.fixture
def store(request):
    return open_store(f"memory://{request.node.name}")


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


class Held(MemoryStore):
    """Payloads wait on their way, as over a slow link, until the gate is open."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate, self.crowd = threading.Event(), Crowd(PARALLEL_BODIES)

    def put(self, key: str, data: bytes | memoryview) -> None:
        if keys.is_payload(key):
            self.crowd.visit()
            assert self.gate.wait(PATIENCE_S)
        super().put(key, data)


def test_a_site_goes_on_looking_at_the_bucket_while_all_its_fragments_are_being_uploaded(request):
    store, runtime = Held(request.node.name), ThreadRuntime()
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
