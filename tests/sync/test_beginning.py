"""Where a process that comes in begins: by bytes and work, from what it holds, and never where the log has a hole."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composer_prime.errors import StoreError, Superseded
from composer_prime.outer.fragments import Fragment, trainable
from composer_prime.store import Store, keys
from composer_prime.store.metered import MeteredStore
from composer_prime.sync.beginning import Beginning, begin, quickest, seconds_to
from composer_prime.sync.entering import SiteIdentity, enter
from composer_prime.sync.members import claim_incarnation
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import load_run
from composer_prime.sync.runtime import ThreadRuntime, side_by_side
from composer_prime.sync.snapshots import Master, Upper
from tests.patience import PATIENCE_S
from tests.sync.harness import HandRuntime, HandSite, ThreadSite, make_terms, run_sites

SNAPSHOT = Beginning(8, "s", 1000)
FIRST = Beginning(0, "f", 400)
HELD = Beginning(0, "f", 0, held=True)
LOG = dict.fromkeys(range(8), 50)


# --- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "log", "byte_s", "replay_s", "chosen"),
    [
        ([], {}, 1.0, 1.0, SNAPSHOT),
        ([FIRST], LOG, 1.0, 0.0, FIRST),  # 400 + 8 * 50 bytes are less than 1000
        ([FIRST, HELD], LOG, 1.0, 0.0, HELD),
        ([FIRST], LOG | {7: 251}, 1.0, 0.0, SNAPSHOT),
        ([FIRST], LOG | {7: 250}, 1.0, 0.0, SNAPSHOT),  # as much: the newest
        ([HELD], LOG, 1.0, 74.0, HELD),
        ([HELD], LOG, 1.0, 76.0, SNAPSHOT),  # eight rounds take 600 s to fetch less, and 608 to apply
        ([HELD], LOG, 0.0, 1.0, SNAPSHOT),  # a link without limit
        ([HELD], {version: 1 for version in LOG if version != 3}, 1.0, 0.0, SNAPSHOT),  # a round is gone
        ([Beginning(5, "h", 0, held=True)], {5: 1, 6: 1, 7: 1}, 1.0, 0.0, Beginning(5, "h", 0, held=True)),
        ([Beginning(9, "h", 0, held=True), HELD], {}, 1.0, 1.0, Beginning(9, "h", 0, held=True)),
        ([Beginning(8, "s", 0, held=True)], {}, 1.0, 1.0, Beginning(8, "s", 0, held=True)),
    ],
)
def test_a_process_begins_where_the_present_is_nearest(others, log, byte_s, replay_s, chosen):
    assert quickest(SNAPSHOT, others, log, byte_s=byte_s, replay_s=replay_s) == chosen
    assert quickest(SNAPSHOT, others[::-1], log, byte_s=byte_s, replay_s=replay_s) == chosen


def test_the_seconds_are_those_of_all_bytes_and_of_all_rounds():
    assert seconds_to(8, FIRST, LOG, byte_s=2.0, replay_s=3.0) == 2.0 * (400 + 8 * 50) + 8 * 3.0
    assert seconds_to(8, SNAPSHOT, {}, byte_s=2.0, replay_s=3.0) == 2000.0
    assert seconds_to(8, HELD, {}, byte_s=0.0, replay_s=0.0) == float("inf")


# --- what there is to choose from ------------------------------------------------------------------------------------


class SlowStore(MeteredStore):
    """Every byte that is read takes time on a clock that a test holds; remembers whose bytes they were."""

    def __init__(self, inner: Store, clock: list[float], byte_s: float) -> None:
        super().__init__(inner)
        self.clock, self.byte_s = clock, byte_s
        self.read: dict[str, int] = {}
        self.fetched: dict[str, int] = {}

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        self.clock[0] += self.byte_s * len(data)
        self.read[key] = max(len(data), self.read.get(key, 0))
        self.fetched[key] = self.fetched.get(key, 0) + len(data)
        return data

    def whole_masters(self) -> list[int]:
        """Versions of the snapshots of fragment 0 of which more than the header was read."""
        return [keys.parse_master(key)[1] for key, got in self.read.items() if keys.is_master(key) and got > 1000]


def net(seed: int = 0) -> nn.Module:
    """Two fragments of 131 thousand parameters that come from bf16."""
    generator = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).bfloat16() * 0.02)
    return made


def own_of(model: nn.Module, version: int = 0) -> Callable[[Fragment], tuple[int, Tensor]]:
    params = LocalParameters(dict(trainable(model.named_parameters())))
    return lambda fragment: (version, params.read(fragment))


TERMS = make_terms(rounds=40, snapshot_rounds=2, max_stale_rounds=2, grace_s=0.0, codec="topk", lr=0.7)


def founded(store: Store, clock: list[float], num_rounds: int, **changes) -> HandSite:
    """A site that has made rounds of fragment 0 alone."""
    site = HandSite(store, TERMS.model_copy(update=changes), "a", clock, net=net())
    for number in range(num_rounds):
        site.beat()
        generator = torch.Generator().manual_seed(number)
        movement = torch.randn(site.replicas[0].numel, generator=generator) * 1e-3
        site.hand_over(0, movement)
        while site.courier.versions()[0] == number:
            site.tick()
            clock[0] += 1.0
        site.courier.collect(0)
    site.tick()
    return site


def begins(slow: SlowStore, own=None) -> Master:
    """What fragment 0 would be followed from."""
    run = load_run(slow)
    master = begin(slow, run, Roster(slow, run.manifest, run.sha256), HandRuntime(slow.clock), own)[0]
    assert isinstance(master, Master)
    return master


def test_who_has_the_models_weights_fetches_no_master_over_a_slow_link(store, clock):
    founded(store, clock, 6)
    slow = SlowStore(store, clock, 1e-3)
    assert begins(slow, own_of(net())).version == 0
    assert slow.whole_masters() in ([], [4])  # a snapshot is what the link is measured by


def test_who_has_not_fetches_the_first_master_where_the_log_after_it_is_short(store, clock):
    founded(store, clock, 6)
    assert begins(SlowStore(store, clock, 1e-3), own_of(net(seed=1))).version == 0
    assert begins(SlowStore(store, clock, 1e-3)).version == 0


def test_over_a_fast_link_the_newest_snapshot_is_taken_rather_than_replayed_to(store, clock):
    founded(store, clock, 6)
    assert begins(SlowStore(store, clock, 1e-12), own_of(net())).version == 4


def test_where_the_log_is_more_than_the_snapshot_the_snapshot_is_taken(store, clock):
    founded(store, clock, 6, codec="fp32")
    assert begins(SlowStore(store, clock, 1e-3), own_of(net())).version == 4


def test_weights_that_are_no_master_of_the_run_are_not_begun_with(store, clock):
    a = founded(store, clock, 6)
    master = begins(SlowStore(store, clock, 1e-3), own_of(net(seed=1)))
    assert master.sha256 == a.run.manifest.masters[0]
    assert torch.equal(master.weights, own_of(net())(a.run.fragments[0])[1])


@pytest.mark.parametrize(("momentum", "version"), [(0.0, 5), (0.5, 0)])
def test_who_comes_back_begins_at_its_checkpoint_unless_masters_hold_momentum(store, clock, momentum, version):
    a = founded(store, clock, 5, momentum=momentum)
    held = [replica.master for replica in a.replicas]
    founded_later = a.courier.versions()[0]
    assert founded_later == 5
    a.hand_over(0, 1e-3)
    while a.courier.versions()[0] == 5:
        a.tick()
        clock[0] += 1.0

    def own(fragment: Fragment) -> tuple[int, Tensor]:
        return held[fragment.index].version, held[fragment.index].weights

    assert begins(SlowStore(store, clock, 1e-3), own).version == version


def test_a_log_that_was_collected_is_not_followed_though_its_first_master_is_at_hand(store, clock):
    founded(store, clock, 13, keep_log=False, liveness_s=10.0)
    assert 0 not in {keys.parse_master(key)[1] for key in store.list(keys.masters_prefix(0))}
    assert begins(SlowStore(store, clock, 1e-3), own_of(net())).version > 8


def test_a_first_master_whose_bytes_are_damaged_is_left_for_what_else_there_is(store, clock):
    a = founded(store, clock, 6)
    (first,) = [key for key in store.list(keys.masters_prefix(0)) if keys.parse_master(key)[1] == 0]
    store.put(first, store.get(first)[:-1])
    run = load_run(store)
    slow = SlowStore(store, clock, 1e-3)
    assert begin(slow, run, a.roster, HandRuntime(clock), None)[0] is None
    late = HandSite(store, TERMS, "b", clock, net=net(seed=1))
    assert late.courier.master(0).sha256 == a.courier.master(0).sha256


@pytest.mark.parametrize("byte_s", [1e-12, 1e-3])
@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_it_begins_from_it_stands_where_the_others_do(store, clock, byte_s, seed):
    a = founded(store, clock, 7)
    slow = SlowStore(store, clock, byte_s)
    entered = enter(
        slow, load_run(slow), SiteIdentity("b"), runtime=HandRuntime(clock), journal=None, own=own_of(net(seed))
    )
    assert entered.courier.versions() == a.courier.versions()
    assert entered.courier.master(0).sha256 == a.courier.master(0).sha256


# --- over a link too slow for whole masters --------------------------------------------------------------------------


def upper_versions(slow: SlowStore, own=None, patience_s: float | None = 1.0) -> list[int | None]:
    """By fragment, the version of the snapshot whose upper half alone was fetched; None: it began otherwise."""
    run = load_run(slow)
    found = begin(slow, run, Roster(slow, run.manifest, run.sha256), HandRuntime(slow.clock), own, patience_s)
    return [each.master.version if isinstance(each, Upper) else None for each in found]


def test_where_whole_masters_would_take_too_long_the_upper_half_of_a_trained_one_is_begun_with(store, clock):
    a = founded(store, clock, 5, codec="fp32")
    slow = SlowStore(store, clock, 1e-3)
    assert upper_versions(slow) == [4, None]  # nothing was merged into fragment 1: whole, it is as short as its half
    assert sum(slow.fetched.values()) < 1.5 * 2 * sum(fragment.numel for fragment in a.run.fragments)
    assert upper_versions(SlowStore(store, clock, 1e-12)) == [None, None]


@pytest.mark.parametrize(("patience_s", "upper"), [(None, None), (1e6, None), (0.0, 4)])
def test_how_long_whole_masters_may_take_is_the_sites_to_say(store, clock, patience_s, upper):
    founded(store, clock, 5, codec="fp32")
    assert upper_versions(SlowStore(store, clock, 1e-3), patience_s=patience_s) == [upper, None]


def test_who_holds_a_master_from_which_the_log_is_short_needs_no_half(store, clock):
    founded(store, clock, 5, codec="topk")
    assert upper_versions(SlowStore(store, clock, 1e-3), own_of(net()), 0.0) == [None, None]


@pytest.mark.parametrize(("committer", "is_coarse"), [("a", False), (None, True)])
def test_the_fixed_committer_waits_for_whole_masters_since_nobody_merges_without_it(store, clock, committer, is_coarse):
    terms = TERMS.model_copy(update={"codec": "fp32", "committer": committer})
    founded(store, clock, 5, codec="fp32", committer=committer)
    again = HandSite(SlowStore(store, clock, 1e-3), terms, "a", clock, net=net(1), patience_s=0.0)
    assert again.courier.is_coarse() == is_coarse


def test_who_creates_a_run_fetches_none_of_the_masters_that_it_has_just_put(store, clock):
    slow = SlowStore(store, clock, 0.0)
    run_sites(ThreadSite(slow, make_terms(), "a"))
    assert not [key for key, got in slow.read.items() if keys.is_master(key) and got > 24]


# --- while it comes in -----------------------------------------------------------------------------------------------


class WatchedStore(MeteredStore):
    """Calls back on every beat that is written."""

    def __init__(self, inner: Store, on_beat: Callable[[], None]) -> None:
        super().__init__(inner)
        self._on_beat = on_beat

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        if key.endswith("/beat"):
            self._on_beat()


def enter_slowly(store: Store, until: threading.Event) -> None:
    """Enter, and wait in the middle of it."""

    class Waiting(MeteredStore):
        def list(self, prefix: str) -> "list[str]":
            if prefix.startswith("masters/"):
                assert until.wait(PATIENCE_S)
            return super().list(prefix)

    runtime = ThreadRuntime()
    slow = Waiting(store)
    try:
        enter(slow, load_run(slow), SiteIdentity("b"), runtime=runtime, journal=None)
    finally:
        runtime.close()


def test_who_takes_long_to_join_beats_meanwhile_so_that_its_pins_are_honoured(store, clock):
    founded(store, clock, 1, liveness_s=0.05)
    beaten, three = [], threading.Event()

    def on_beat() -> None:
        beaten.append(1)
        if len(beaten) == 3:
            three.set()

    enter_slowly(WatchedStore(store, on_beat), three)
    num_beats = len(beaten)
    assert num_beats >= 3 and len(beaten) == num_beats


def test_who_is_started_again_while_it_joins_stops(store, clock):
    a = founded(store, clock, 1, liveness_s=0.05)
    claimed, seen = threading.Event(), threading.Event()

    def claim() -> None:
        if not claimed.is_set():
            claim_incarnation(store, "b", a.roster)
            claimed.set()

    class Telling(WatchedStore):
        def list(self, prefix: str) -> "list[str]":
            found = super().list(prefix)
            if claimed.is_set() and prefix == keys.site_prefix("b"):
                seen.set()  # the beat under way has seen the other's claim
            return found

    with pytest.raises(Superseded):
        enter_slowly(Telling(store, claim), seen)


def test_bodies_side_by_side_may_map_and_the_first_error_is_raised_once_all_have_ended():
    runtime, done, meet = ThreadRuntime(), [], threading.Barrier(2)

    def body() -> None:
        meet.wait(PATIENCE_S)
        done.append(sum(runtime.map(lambda number: number, range(40))))

    def failing() -> None:
        meet.wait(PATIENCE_S)
        raise StoreError("on cue")

    try:
        side_by_side(runtime, "test", [body, body])
        assert done == [780, 780]
        with pytest.raises(StoreError, match="on cue"):
            side_by_side(runtime, "test", [body, failing])
        assert done == [780] * 3
        side_by_side(runtime, "test", [])
    finally:
        runtime.close()
