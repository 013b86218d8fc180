"""Sites of different speed, and stores that can't decide between two writers."""

import threading
import time

import pytest
import torch
from torch import nn

from composer_prime.errors import ConfigError
from composer_prime.outer.fragments import trainable
from composer_prime.store import keys, open_store
from composer_prime.store.memory import MemoryStore
from composer_prime.sync.entering import SiteIdentity, enter
from composer_prime.sync.errands import Capture
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Commit, Offer
from composer_prime.sync.runtime import PARALLEL_BODIES, ThreadRuntime, side_by_side
from composer_prime.sync.start import Founding, create_or_join
from tests.crowd import Crowd
from tests.patience import PATIENCE_S
from tests.sync.harness import ThreadSite, make_terms, run_sites


class Slow(ThreadSite):
    """A site whose inner step takes a while."""

    step_s = 0.0

    def step(self) -> None:
        super().step()
        time.sleep(self.step_s)  # a machine that is slower; nothing is waited for


@pytest.fixture
def store(request):
    return open_store(f"memory://{request.node.name}")


def test_by_seconds_a_fast_and_a_slow_site_meet_in_every_round_with_different_steps(store):
    terms = make_terms(pace="seconds", inner_seconds=0.4, fragments=2, rounds=3, grace_s=60.0, sync_delay=1)
    fast, slow = Slow(store, terms, "fast", data_seed=1), Slow(store, terms, "slow", data_seed=2)
    fast.step_s, slow.step_s = 0.01, 0.08
    run_sites(fast, slow)
    assert fast.summary["masters"] == slow.summary["masters"]
    assert fast.steps > 2 * slow.steps
    for fragment in range(2):
        for version in range(1, 3):
            taken = read_record(store, Commit, keys.commit(fragment, version)).taken
            assert [entry.site for entry in taken] == ["fast", "slow"]
            offers = [read_record(store, Offer, keys.offer(fragment, version, site)) for site in ("fast", "slow")]
            assert offers[0].steps > offers[1].steps
            assert taken[0].multiplier > taken[1].multiplier, "more tokens weigh more"


class Careless(MemoryStore):
    """A store that takes If-None-Match and ignores it, as some gateways do: every writer wins."""

    def create(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


@pytest.mark.parametrize("kind", ["careless", pytest.param("rclone", marks=pytest.mark.s3)])
def test_with_a_fixed_committer_a_store_that_lets_two_writers_win_is_safe(kind, store_uri):
    """rclone's S3 server takes If-None-Match and ignores it; it is refused as an ordinary run's store."""
    terms = make_terms(committer="b", rounds=4, sync_delay=1, gather_sites=2, merged_codec="fp32")
    uri = None if kind == "careless" else store_uri(kind)
    stores = [Careless("careless") if uri is None else open_store(uri) for _ in range(3)]
    sites = [
        ThreadSite(store, terms, name, data_seed=i) for i, (store, name) in enumerate(zip(stores, "abc", strict=True))
    ]
    gate = threading.Barrier(3)
    for site in sites:  # all are members before any trains
        site.after_join = lambda: gate.wait(PATIENCE_S)
    run_sites(*sites)
    assert len({str(site.summary["masters"]) for site in sites}) == 1
    commits = [read_record(stores[0], Commit, keys.commit(f, v)) for f in range(2) for v in range(5)]
    assert {commit.committer for commit in commits} == {"b"}
    assert any(commit.num_parts for commit in commits)
    for store in stores:
        store.close()


def test_where_one_site_commits_the_others_wait_for_it_to_create_the_run(monkeypatch):
    monkeypatch.setattr("composer_prime.sync.start.WAIT_FOR_CREATOR_S", 0.2)
    site = ThreadSite(Careless("empty"), make_terms(committer="b"), "a")
    with pytest.raises(ConfigError, match="only its committer, site b, may create it"):
        run_sites(site)


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
    courier = enter(store, run, SiteIdentity("a"), runtime=runtime, journal=None).courier
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
