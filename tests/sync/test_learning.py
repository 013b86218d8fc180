"""A joiner is a learner until its masters are whole: it offers nothing, trains meanwhile, and loses none of that."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composer_prime.errors import Superseded
from composer_prime.outer.fragments import trainable
from composer_prime.store import Store, keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.learning import READING_S, Held
from composer_prime.sync.metered import MeteredStore
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Beat, Offer
from tests.simulation.runtime import Scheduler
from tests.sync.harness import (
    HandSite,
    ThreadSite,
    assert_fates_add_up,
    make_net,
    make_terms,
    run_sites,
    shas,
    train_step,
)
from tests.sync.test_one_bad_word import STEP_S, TERMS, Denying, VirtualSite

H = TERMS.inner_steps
SLOW_S = 100.0
"""Virtual seconds that a joiner takes to read a master: longer than H inner steps of STEP_S."""


# --- where it begins -------------------------------------------------------------------------------------------------


class Watched(MeteredStore):
    """Remembers of which masters more than the header was read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read: list[int] = []

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if keys.is_master(key) and keys.parse_master(key)[0] == 0 and length > 24:
            self.read.append(keys.parse_master(key)[1])
        return super().get_range(key, start, length)


def founded(store: Store, clock: list[float], num_rounds: int, **changes) -> HandSite:
    """A site that has made rounds of fragment 0 alone."""
    terms = make_terms(rounds=40, snapshot_rounds=4, grace_s=0.0, **changes)
    site = HandSite(store, terms, "a", clock)
    go_on(site, num_rounds)
    return site


def go_on(site: HandSite, num_rounds: int) -> None:
    for number in range(site.courier.versions()[0], site.courier.versions()[0] + num_rounds):
        site.beat()
        site.hand_over(0, 0.5 + number)
        while site.courier.versions()[0] == number:
            site.tick()
            site.runtime.advance(1.0)
        site.courier.collect(0)
    site.tick()


def own_weights(site: HandSite, seed: int) -> Held:
    params = LocalParameters(dict(trainable(make_net(seed).named_parameters())))
    return Held([(0, params.read(fragment)) for fragment in site.run.fragments])


def present(site: HandSite) -> Held:
    masters = [replica.master for replica in site.replicas]
    return Held([(master.version, master.weights) for master in masters], of_run=True)


@pytest.mark.parametrize(
    ("num_rounds", "momentum", "holds", "read"),
    [
        (2, 0.5, lambda a: own_weights(a, 0), []),  # the weights that the run began with, and no newer snapshot
        (2, 0.5, lambda a: own_weights(a, 1), [0]),  # others
        (2, 0.5, lambda a: None, [0]),
        (4, 0.5, lambda a: own_weights(a, 0), [4]),  # a newer one stands
        (4, 0.0, present, []),  # the snapshot itself
        (6, 0.0, present, []),  # newer than it
        (6, 0.5, present, [4]),  # without the outer momentum
    ],
)
def test_a_joiner_reads_the_newest_snapshot_unless_it_holds_that_or_a_newer_one(
    store, clock, num_rounds, momentum, holds, read
):
    a = founded(store, clock, num_rounds, momentum=momentum)
    held, watched = holds(a), Watched(store)
    go_on(a, 1)
    b = HandSite(watched, a.run.terms, "b", clock, seed=1, held=held)
    assert watched.read == read
    assert [b.courier.master(at).sha256 for at in (0, 1)] == [a.courier.master(at).sha256 for at in (0, 1)]


def test_a_held_base_that_the_log_does_not_name_is_not_begun_with(store, clock):
    a = founded(store, clock, 6)
    held = Held([(version, values + 1.0) for version, values in present(a).values], of_run=True)
    go_on(a, 1)
    b = HandSite(store, a.run.terms, "b", clock, held=held)
    assert b.courier.master(0).sha256 == a.courier.master(0).sha256


def test_who_creates_a_run_fetches_none_of_the_masters_that_it_has_just_put(store):
    watched = Watched(store)
    run_sites(ThreadSite(watched, make_terms(), "a"))
    assert watched.read == []


# --- while it learns -------------------------------------------------------------------------------------------------


def values_of(net: nn.Module, site: VirtualSite) -> Tensor:
    return LocalParameters(dict(trainable(net.named_parameters()))).read(site.outer._fragments[0])


class Learner(VirtualSite):
    """Joins the run that site a trains in, over a link on which each master takes SLOW_S."""

    def __init__(self, store: MemoryStore, scheduler: Scheduler, *, seed: int = 0) -> None:
        denying = Denying(store)
        super().__init__(denying, self._look, name="b", net=make_net(seed), scheduler=scheduler)
        denying.says = self._slow
        self.bucket = store
        self.learned: list[tuple[float, Tensor]] = []
        """Of each inner step as a learner: when it began, and the parameters then."""
        self.moved: Tensor | None = None
        """Its movement right after it stood on masters, in fragment 0."""
        self.on_learning: Callable[[], object] = lambda: None

    def _slow(self, operation: str, key: str) -> None:
        if keys.is_master(key) and self.scheduler.current.process is self.process:
            self.process.wait(SLOW_S)

    @property
    def is_learner(self) -> bool:
        return not self.outer.summary()["masters"]

    def offers(self) -> list[Offer]:
        found = [key for key in self.bucket.list("rounds/") if keys.is_offer(key) and keys.offer_site(key) == "b"]
        offers = [read_record(self.bucket, Offer, key) for key in found]
        return sorted((offer for offer in offers if offer.payload is not None), key=lambda offer: offer.trained_tokens)

    def _look(self, step: int) -> None:
        if self.is_learner:
            assert self.offers() == []
            beats = [key for key in self.bucket.list(keys.site_prefix("b")) if keys.is_beat(key)]
            beat = read_record(self.bucket, Beat, max(beats))
            assert (beat.state, beat.pins) == ("joining", (0, 0))
            self.learned.append((self.scheduler.time, values_of(self.net, self)))
            self.on_learning()
        elif self.moved is None:
            self.moved = values_of(self.net, self) - self.outer._stands[0].base


def run_with(store: MemoryStore, *joiners: Learner) -> VirtualSite:
    """Site a and these, to their ends; a joiner whose process is killed has none. What ended one is raised."""
    a = VirtualSite(Denying(store), scheduler=joiners[0].scheduler)
    a.start()
    for joiner in joiners:
        joiner.start(after_s=20 * STEP_S)
    a.scheduler.run(until=1e6, most_events=10**6)
    for site in (a, *joiners):
        if site.process.error is not None and not site.process.is_dead:
            raise site.process.error
    return a


def test_a_learner_trains_meanwhile_offers_nothing_before_it_is_whole_and_carries_all_that_it_has_learned(store):
    b, alone, data = Learner(store, Scheduler()), make_net(0), torch.Generator().manual_seed(0)
    a = run_with(store, b)
    assert len(b.learned) == H, "then it waits"
    assert b.learned[0][0] >= 20 * STEP_S + READING_S
    assert torch.equal(b.learned[0][1], values_of(alone, b))
    for _ in range(H):
        train_step(alone, data, lr=0.05)
    assert b.moved is not None and torch.allclose(b.moved, values_of(alone, b) - b.learned[0][1], atol=1e-5)
    (offer, *_) = b.offers()
    assert offer.tokens > 10 * H and offer.steps > H
    assert shas(b) == shas(a)
    assert all(torch.equal(p, q) for p, q in zip(a.net.parameters(), b.net.parameters(), strict=True))
    for site in (a, b):
        assert_fates_add_up(site)


def test_a_joiner_that_holds_nothing_of_the_run_does_not_train_before_its_masters_are_whole(store):
    b = Learner(store, Scheduler(), seed=1)
    a = run_with(store, b)
    assert b.learned == [] and b.offers() and shas(b) == shas(a)


@pytest.mark.parametrize("end", ["killed", "killed with a checkpoint", "leaves"])
def test_a_learner_that_ends_comes_back_and_what_its_checkpoint_holds_is_not_lost(store, end):
    scheduler = Scheduler()
    b = Learner(store, scheduler)
    again = Learner(store, scheduler)

    def come_back() -> None:
        if len(b.learned) < 3:
            return
        if end != "killed":
            again.net.load_state_dict(b.net.state_dict())
            again.outer.load_state_dict(b.outer.state_dict())
            again.steps = b.steps - 1
        if end == "leaves":
            b.leaves = True
        else:
            scheduler.call_at(scheduler.time, b.process.kill)
        again.start(after_s=3 * STEP_S)

    b.on_learning = come_back
    a = run_with(store, b)
    assert len(again.learned) == (H if end == "killed" else H - 2), "as many in all as one would have made"
    assert shas(again) == shas(a)
    assert_fates_add_up(again)


def test_a_learner_whose_name_another_process_takes_stops(store):
    scheduler = Scheduler()
    b, other = Learner(store, scheduler), Learner(store, scheduler)
    b.on_learning = lambda: len(b.learned) == 1 and other.start()
    with pytest.raises(Superseded):
        run_with(store, b)
    assert shas(other)


def test_a_learner_of_a_run_that_ends_meanwhile_gets_its_masters_and_counts_what_it_trained_as_dropped(store):
    scheduler = Scheduler()
    b = Learner(store, scheduler)
    a = VirtualSite(Denying(store), scheduler=scheduler)
    a.start()
    b.start(after_s=(TERMS.rounds * TERMS.inner_steps - 2) * STEP_S)
    scheduler.run(until=1e6, most_events=10**6)
    assert b.process.error is None and b.outer.finished and b.offers() == []
    assert shas(b) == shas(a) and all(fates["dropped"] == 10 * b.steps > 0 for fates in b.summary["tokens"])
