"""Rules 7 and 12: every token has one fate, also of a site that was killed and comes back from an older checkpoint."""

import copy
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer_prime.store import keys
from composer_prime.sync.ledger import FragmentLedger
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.terms import Terms
from tests.patience import PATIENCE_S
from tests.sync.harness import commit_of, make_net, make_terms

# --- an inner step here moves every parameter by one, so that a master tells how many steps it holds -----------------


TOKENS = 10


class Drifter:
    """A site whose every inner step adds 1 to every parameter."""

    def __init__(self, store, terms: Terms, checkpoint: dict[str, Any] | None = None, name: str = "a") -> None:
        self.net: nn.Module = make_net()
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.zero_()
        self.outer = OuterLoop(store, terms, run="run", site=name)
        if checkpoint is not None:
            self.net.load_state_dict(checkpoint["net"])
            self.outer.load_state_dict(checkpoint["outer"])
        self.outer.join(self.net.named_parameters())

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter += 1
        self.outer.after_inner_step(TOKENS, 1)

    def checkpoint(self) -> dict[str, Any]:
        return copy.deepcopy({"net": self.net.state_dict(), "outer": self.outer.state_dict()})

    def die(self) -> None:
        """Fall silent, as a killed process does: no word to anybody, nothing saved."""
        self.outer._driver.close()

    def finish(self) -> list[dict[str, int]]:
        """Train to the end of the run; the token counts of each fragment."""
        while not self.outer.finished:
            self.step()
        tokens = self.outer.summary()["tokens"]
        self.outer.close()
        return tokens

    def values(self) -> list[float]:
        """The value that all elements of each fragment share."""
        values = []
        for stand in self.outer._stands:
            assert torch.all(stand.base == stand.base[0])
            values.append(float(stand.base[0]))
        return values


def assert_masters_hold_what_was_merged(site: Drifter, tokens: list[dict[str, int]]) -> None:
    for value, ledger in zip(site.values(), tokens, strict=True):
        assert value == ledger["merged"] / TOKENS
        assert ledger["trained"] == ledger["merged"] + ledger["dropped"]


@pytest.mark.parametrize("sync_delay", [0, 1])
@pytest.mark.parametrize("killed_after", [5, 6, 7, 8, 9, 10])
@pytest.mark.parametrize("checkpoint_at", [1, 2, 3, 4, 5])
def test_masters_hold_each_merged_step_once_whenever_a_site_is_killed(store, checkpoint_at, killed_after, sync_delay):
    terms = make_terms(rounds=4, sync_delay=sync_delay)
    first, saved = Drifter(store, terms), {}
    for step in range(1, killed_after + 1):
        first.step()
        if step == checkpoint_at:
            saved = first.checkpoint()
    first.die()
    back = Drifter(store, terms, saved)
    assert_masters_hold_what_was_merged(back, back.finish())


@pytest.mark.parametrize("killed_after", [1, 2, 3, 5, 8])
def test_a_site_that_lost_its_disk_comes_back_from_the_bucket_alone(store, killed_after):
    terms = make_terms(rounds=4, sync_delay=1)
    first = Drifter(store, terms)
    for _ in range(killed_after):
        first.step()
    first.die()
    back = Drifter(store, terms)
    tokens = back.finish()
    merged_before = [value - ledger["merged"] / TOKENS for value, ledger in zip(back.values(), tokens, strict=True)]
    assert all(0 <= steps <= killed_after for steps in merged_before)


def test_an_offer_that_was_out_when_its_site_was_killed_is_followed_to_its_end(store):
    terms = make_terms(rounds=2, quorum=2, sync_delay=1, grace_s=0.0, liveness_s=1.0)
    first = Drifter(store, terms)
    first.step()
    saved = first.checkpoint()
    first.step()  # offers fragment 0; with a quorum of 2 nobody can close the round
    while not store.list(keys.offers_prefix(0, 0)):
        threading.Event().wait(0.01)
    first.die()
    back, other = Drifter(store, terms, saved), Drifter(store, terms, name="b")
    assert back.values() == [0.0, 0.0] and next(back.net.parameters()).flatten()[0].item() == 2.0
    assert back.outer._stands[0].captured is not None and back.outer._stands[0].ledger.captured == 2 * TOKENS
    counts: dict[str, list[dict[str, int]]] = {}
    threads = [
        threading.Thread(target=lambda site=site, name=name: counts.update({name: site.finish()}))
        for name, site in (("a", back), ("b", other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert set(counts) == {"a", "b"}
    for ledger in counts["a"] + counts["b"]:
        assert ledger["trained"] == ledger["merged"] + ledger["dropped"]
    assert back.values() == other.values()


def make_slow_terms() -> Terms:
    """A turn every twentieth step, and a round of both sites or none."""
    return make_terms(inner_steps=40, sync_delay=19, quorum=2, rounds=2)


def make_offered(store, terms: Terms) -> Drifter:
    """Site b, whose offer of twenty steps stands in round 0 of fragment 0."""
    other = Drifter(store, terms, name="b")
    for _ in range(20):
        other.step()
    upload = other.outer._courier._errands[0].upload
    assert upload is not None
    upload.join(timeout=PATIENCE_S)
    other.outer._courier.tick()
    return other


def bring_back(store, terms: Terms, num_steps: int) -> Drifter:
    """Site a, killed after so many steps with a checkpoint of them, started again; it has looked at the bucket."""
    first = Drifter(store, terms)
    for _ in range(num_steps):
        first.step()
    saved = first.checkpoint()
    first.die()
    back = Drifter(store, terms, saved)
    back.outer._courier.tick()
    return back


def test_a_site_that_comes_back_gets_into_the_round_that_is_under_way(store):
    terms = make_slow_terms()
    other = make_offered(store, terms)
    back = bring_back(store, terms, 3)
    back.step()
    courier = back.outer._courier
    with courier.changed:
        while courier.versions() != (1, 0):
            assert courier.changed.wait(timeout=PATIENCE_S), "the round doesn't close"
    taken = commit_of(store).taken
    assert [(entry.site, entry.tokens) for entry in taken] == [("a", 4 * TOKENS), ("b", 20 * TOKENS)]
    courier.tick()
    for _ in range(15):  # up to step 19: its next turn is due with the twentieth step, as ever
        back.step()
    assert courier.versions() == (1, 0) and not courier.has_errands
    back.die()
    other.die()


def test_a_site_that_comes_back_to_nobody_keeps_to_its_steps(store):
    back = bring_back(store, make_slow_terms(), 3)
    for _ in range(16):  # up to step 19
        back.outer._courier.tick()
        back.step()
    assert not back.outer._courier.has_errands
    back.step()
    assert back.outer._courier.has_errands
    back.die()


def test_a_new_site_keeps_to_its_steps_beside_a_round_that_is_under_way(store):
    terms = make_slow_terms()
    other = make_offered(store, terms)
    new = Drifter(store, terms)
    new.outer._courier.tick()
    new.step()
    assert not new.outer._courier.has_errands
    new.die()
    other.die()


# --- the books -------------------------------------------------------------------------------------------------------


EVENTS = st.lists(
    st.one_of(
        st.integers(0, 1000).map(lambda tokens: ("train", tokens)),
        st.sampled_from([("capture", 0), ("taken", 0), ("missed", 0), ("drop", 0)]),
    ),
    max_size=60,
)


def play(events) -> FragmentLedger:
    ledger, out = FragmentLedger(), False
    for name, tokens in events:
        if name == "train":
            ledger.train(tokens)
        elif name == "capture" and not out:
            ledger.capture()
            out = True
        elif name == "taken" and out:
            ledger.settle_taken()
            out = False
        elif name == "missed" and out:
            ledger.miss_round()
            ledger.release_capture()
            out = False
        elif name == "drop":
            ledger.drop()
            out = False
    return ledger


@settings(max_examples=500, derandomize=True)
@given(EVENTS)
def test_trained_is_merged_plus_dropped_plus_carried_after_any_history(events):
    ledger = play(events)
    assert ledger.trained == sum(tokens for name, tokens in events if name == "train")
    assert ledger.trained == ledger.merged + ledger.dropped + ledger.carried
    assert ledger.carried == ledger.pending + ledger.captured
    assert min(ledger.merged, ledger.dropped, ledger.pending, ledger.captured) >= 0


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_a_book_restored_from_the_bucket_counts_what_is_in_neither_as_dropped(merged, carried, lost):
    ledger = FragmentLedger()
    ledger.restore(trained=merged + carried + lost, merged=merged, carried=carried, steps=3)
    assert (ledger.merged, ledger.captured, ledger.dropped) == (merged, carried, lost)
    assert ledger.trained == ledger.merged + ledger.dropped + ledger.carried
