"""What the tape says of offers that were taken: whose was clipped, whose stood against the round, who signed two."""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from composer_prime.errors import StoreError
from composer_prime.outer.sparse import Sparse
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync import witness
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Commit, Offer, Part
from composer_prime.sync.replica import rebuild_master
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from composer_prime.sync.verifying import Verifier
from composer_prime.sync.witness import BLOCK_ELEMENTS, SAMPLE_BLOCKS, agreement, is_second_record, sample_spans
from tests.sync.harness import HandSite, make_terms
from tests.sync.test_many_sites import Crowd, terms_of

SIGNING = {name: SigningKey.generate() for name in "abc"}
FOUNDING = Founding(keys={name: key.public for name, key in SIGNING.items()})


def told(site: HandSite, event: str) -> list[dict[str, Any]]:
    """The events of that name on a site's tape, oldest first."""
    site.courier._tape.flush()
    lines = [line for key in site.store.list(keys.tape_prefix(site.name)) for line in site.store.get(key).splitlines()]
    return [found for found in map(json.loads, lines) if found["event"] == event]


def signed_sites(store: Store, clock: list[float], names: str = "abc", **changes: Any) -> list[HandSite]:
    terms = make_terms(fragments=1, grace_s=2.0, liveness_s=1e6, rounds=9, snapshot_rounds=100, **changes)
    sites = [HandSite(store, terms, name, clock, key=SIGNING[name], founding=FOUNDING) for name in names]
    for site in sites:
        site.courier._look_at_members(clock[0])
    return sites


def play_round(clock: list[float], sites: list[HandSite], values: dict[str, torch.Tensor | float]) -> int:
    """A round that takes what every site offers; its version."""
    version = sites[0].courier.versions()[0]
    for site in sites:
        site.courier.collect(0)
        site.hand_over(0, values[site.name])
    for _ in range(8):
        for site in sites:
            site.tick()
        clock[0] += 1.0
    assert {site.courier.versions()[0] for site in sites} == {version + 1}
    return version


def apart(version: int) -> dict[str, torch.Tensor | float]:
    """Movements of one direction that aren't copies of each other."""
    return {name: 1.0 + index + 10 * version for index, name in enumerate("abc")}


def put_over(store: Store, site: HandSite, version: int, key: SigningKey | None = None) -> None:
    """Another offer of that site for a round, over the one that stands."""
    place = keys.offer(0, version, site.name)
    second = read_record(store, Offer, place).model_copy(update={"tokens": 5, "signature": None})
    signature = (key or SIGNING[site.name]).sign(second.message(site.run.sha256))
    store.put(place, second.model_copy(update={"signature": signature}).to_bytes())


# --- agreement -------------------------------------------------------------------------------------------------------


def test_a_movement_the_other_way_has_a_negative_cosine_and_the_others_a_positive_one():
    east, northeast = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    found = agreement({"a": east, "b": northeast, "c": east + northeast, "d": -east})
    directions = [east, northeast / 2**0.5, (east + northeast) / 5**0.5, -east]
    for index, site in enumerate("abcd"):
        others = sum(directions[:index] + directions[index + 1 :], torch.zeros(2))
        assert found[site] == pytest.approx(
            float(torch.nn.functional.cosine_similarity(directions[index], others, 0)), abs=6e-4
        )
    assert found["d"] < 0 < min(found["b"], found["c"])


def test_however_long_a_movement_is_it_counts_as_one_and_never_for_itself():
    east, north = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert agreement({"a": east, "b": 1000 * east, "c": -1000 * east})["c"] == -1.0
    assert agreement({"a": east, "b": east, "c": 1e6 * north}) == {"a": 0.707, "b": 0.707, "c": 0.0}


@pytest.mark.parametrize("codec", ["dense", "sparse"])
def test_a_flip_is_seen_among_ten_whose_common_direction_is_a_hundredth_of_their_noise(codec):
    """Where each movement's own part in the sum would be ten times what they have in common."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(2**18, generator=generator)
    vectors: dict[str, Any] = {}
    for index in range(10):
        x = 0.1 * common + torch.randn(2**18, generator=generator)
        x = -x if index == 9 else x
        places = np.flatnonzero(x.abs().numpy() > 1)
        vectors[str(index)] = x if codec == "dense" else Sparse(2**18, places, x.numpy()[places])
    found = agreement(vectors)
    assert found["9"] < -0.005 and min(found[str(index)] for index in range(9)) > 0.005


def test_two_offers_have_no_round_to_stand_against():
    assert agreement({"a": torch.ones(4), "b": -torch.ones(4)}) == {}
    assert agreement({"a": torch.ones(4), "b": -torch.ones(4), "c": torch.zeros(4)}) == {}


def test_no_cosine_is_ever_not_a_number():
    huge, zero, fine = torch.full((64,), 3e38), torch.zeros(64), torch.full((64,), 1e-38)
    assert agreement({"a": huge, "b": zero, "c": fine, "d": fine}) == {"a": 1.0, "c": 1.0, "d": 1.0}
    assert agreement({"a": huge, "b": huge, "c": fine, "d": torch.full((64,), torch.inf)}).keys() == set("abc")
    assert agreement({"a": huge, "b": huge, "c": -fine, "d": -fine, "e": fine}) == {"c": -1.0, "d": -1.0}


def test_a_sparse_movement_is_compared_where_it_has_values():
    places = np.array([1, 5, 6])
    few = Sparse(8, places, np.array([1.0, -2.0, 3.0], dtype=np.float32))
    beside = Sparse(8, np.array([0, 1]), np.array([4.0, 3.0], dtype=np.float32))
    alone = Sparse(8, np.array([7]), np.array([5.0], dtype=np.float32))
    found = agreement({"a": few, "b": few, "c": beside, "d": alone})
    others = np.array([1.0, -2.0, 3.0]) / math.sqrt(14) + np.array([3 / 5, 0.0, 0.0])
    wanted = np.dot([1.0, -2.0, 3.0], others) / math.sqrt(14) / np.linalg.norm(others)
    assert found["a"] == found["b"] == round(float(wanted), 3)
    assert found["c"] == 0.6 and "d" not in found


def test_of_a_long_vector_at_most_2_to_the_18_elements_are_read_from_its_first_to_its_last_and_they_tell_as_much():
    assert SAMPLE_BLOCKS * BLOCK_ELEMENTS == 2**18
    assert sample_spans(2**18) == (slice(0, 2**18),)
    spans = sample_spans(25_000_001)
    assert sum(span.stop - span.start for span in spans) == 2**18
    assert (spans[0].start, spans[-1].stop) == (0, 25_000_001)
    assert all(one.stop <= other.start for one, other in pairwise(spans))
    generator = torch.Generator().manual_seed(0)
    common, noise = (torch.randn(2**20, generator=generator) for _ in range(2))
    found = agreement({"a": common, "b": common, "c": common, "d": -common, "e": common + noise})
    assert found["d"] < -0.95 and abs(found["e"] - 0.5**0.5) < 0.01


def test_every_site_of_a_gathered_round_tells_the_same_agreement_and_who_stood_against_it(store, clock):
    sites = signed_sites(store, clock)
    half = torch.arange(sites[0].run.fragments[0].numel) % 2
    values: dict[str, torch.Tensor | float] = {"a": 1.0, "b": 1.0 + half, "c": -1.0}
    play_round(clock, sites, values)
    events = [told(site, "round")[-1]["agreement"] for site in sites]
    assert events == [agreement({"a": torch.ones(99), "b": 1.0 + half, "c": -torch.ones(99)})] * 3
    assert events[0]["c"] < -0.9


def test_masters_that_are_rebuilt_or_verified_compare_nothing(store, clock, monkeypatch):
    sites = signed_sites(store, clock)
    play_round(clock, sites, apart(0))
    calls: list[object] = []
    monkeypatch.setattr(witness, "agreement", lambda *args: calls.append(args) or {})
    a = sites[0]
    assert rebuild_master(store, a.run, 0, 1, runtime=a.runtime, roster=a.roster).sha256 == a.courier.master(0).sha256
    verifier = Verifier(store)
    verifier.check(0)
    verifier.close()
    assert calls == []


# --- clipped ---------------------------------------------------------------------------------------------------------


def test_the_tape_has_the_factor_of_every_offer_that_was_clipped_and_of_no_other(store, clock):
    sites = signed_sites(store, clock, aggregate="clipped", weighting="equal", clip=2.0)
    play_round(clock, sites, {"a": 1.0, "b": 1.5, "c": 1000.0})
    commit = read_record(store, Commit, keys.commit(0, 0))
    norms = {entry.site: entry.offer.norm for entry in commit.taken}
    for site in sites:
        assert told(site, "round")[-1]["clipped"] == {"c": 2.0 * norms["b"] / norms["c"]}
    assert commit.taken[2].multiplier == float(np.float32(1 / 3 * (2.0 * norms["b"] / norms["c"])))


def test_a_mean_clips_nobody(store, clock):
    sites = signed_sites(store, clock)
    play_round(clock, sites, {"a": 1.0, "b": 1.5, "c": 1000.0})
    assert told(sites[0], "round")[-1]["clipped"] == {}


# --- parts -----------------------------------------------------------------------------------------------------------


def test_who_merges_a_part_tells_once_what_it_left_out_and_who_stood_against_it(store):
    crowd = Crowd(store, terms_of("fp32", merged_codec="fp32", slices=6), 6, 600)
    crowd.look_around()
    for index, site in enumerate(crowd.sites):
        site.hand_over(0, torch.full((600,), 1.0 + index if index != 4 else -1.0))
        site.runtime.run_tasks()
        site.courier._bring(0)
    offer = read_record(store, Offer, keys.offer(0, 0, "s02"))
    assert offer.payload is not None
    store.delete(offer.payload)
    for _ in range(12):
        for site in crowd.sites:
            site.courier.tick()
        crowd.clock[0] += 1.0
    events = {event["part"]: event for site in crowd.sites for event in told(site, "part")}
    assert sum(len(told(site, "part")) for site in crowd.sites) == len(events) == 6
    for index, event in events.items():
        part = read_record(store, Part, keys.merged(0, 0, index))
        assert (event["site"], event["fragment"], event["version"]) == (part.reducer, 0, 0)
        assert event["excluded"] == {entry.site: entry.why for entry in part.excluded}
        assert event["agreement"].keys() == {f"s{n:02d}" for n in range(6)} - event["excluded"].keys()
        assert event["agreement"]["s04"] == -1.0 and event["agreement"]["s00"] == 1.0
    assert sum("s02" in event["excluded"] for event in events.values()) >= 5
    assert {str(told(site, "round")[-1]["agreement"]) for site in crowd.sites} == {"{}"}


# --- equivocated -----------------------------------------------------------------------------------------------------


def test_a_second_record_over_an_offer_that_was_taken_is_told_once_by_the_rounds_committer(store, clock):
    sites = signed_sites(store, clock)
    version = play_round(clock, sites, apart(0))
    put_over(store, sites[2], version)
    assert [told(site, "equivocated") for site in sites] == [[], [], []]
    play_round(clock, sites, apart(1))
    play_round(clock, sites, apart(2))
    committer = read_record(store, Commit, keys.commit(0, version)).committer
    found = [event for site in sites for event in told(site, "equivocated")]
    assert [(event["site"], event["by"], event["fragment"], event["version"]) for event in found] == [
        (committer, "c", 0, version)
    ]


def test_one_that_comes_before_the_commit_is_told_by_those_who_had_read_the_first(store, clock):
    sites = signed_sites(store, clock)
    play_round(clock, sites, apart(0))
    for site in sites:
        site.courier.collect(0)
    for site in (sites[2], sites[0]):
        site.hand_over(0, apart(1)[site.name])
        site.tick()
    sites[0].tick()  # a has an offer in the round and has read c's
    put_over(store, sites[2], 1)
    sites[1].hand_over(0, apart(1)["b"])
    for _ in range(8):
        for site in reversed(sites):
            site.tick()
        clock[0] += 1.0
    commit = read_record(store, Commit, keys.commit(0, 1))
    (tokens,) = (entry.offer.tokens for entry in commit.taken if entry.site == "c")
    told_by = {site.name for site in sites if told(site, "equivocated")}
    assert [event["by"] for site in sites for event in told(site, "equivocated")] == ["c"] * len(told_by)
    assert ("a" in told_by) == (tokens == 5), "a has seen the first; the commit took the second"
    assert told_by


def test_one_that_comes_when_the_next_round_has_closed_is_told_max_stale_rounds_later(store, clock):
    sites = signed_sites(store, clock, max_stale_rounds=3)
    version = play_round(clock, sites, apart(0))
    play_round(clock, sites, apart(1))
    put_over(store, sites[2], version)
    play_round(clock, sites, apart(2))
    assert [told(site, "equivocated") for site in sites] == [[], [], []]
    play_round(clock, sites, apart(3))
    assert [event["by"] for site in sites for event in told(site, "equivocated")] == ["c"]


@pytest.mark.parametrize("what", ["untouched", "deleted", "forged", "another round's", "garbled"])
def test_what_the_site_itself_has_not_signed_for_that_round_proves_nothing(store, clock, what):
    sites = signed_sites(store, clock)
    play_round(clock, sites, apart(0))
    version, key = play_round(clock, sites, apart(1)), keys.offer(0, 1, "c")
    if what == "deleted":
        store.delete(key)
    elif what == "forged":
        put_over(store, sites[2], version, SIGNING["a"])
    elif what == "another round's":
        store.put(key, store.get(keys.offer(0, 0, "c")))
    elif what == "garbled":
        store.put(key, b"{}")
    play_round(clock, sites, apart(2))
    assert [told(site, "equivocated") for site in sites] == [[], [], []]


def test_the_last_rounds_offers_are_read_again_when_the_site_leaves(store, clock):
    sites = signed_sites(store, clock)
    version = play_round(clock, sites, apart(0))
    put_over(store, sites[2], version)
    for site in sites:
        site.courier.finish()
    assert sum(len(told(site, "equivocated")) for site in sites) == 1


class Deaf:
    """A store that fails whoever reads an offer's record, once told to, and counts them."""

    def __init__(self, store: Store) -> None:
        self._store, self.is_deaf, self.num_reads = store, False, 0

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if keys.is_offer(key):
            self.num_reads += 1
            if self.is_deaf:
                raise StoreError("no answer")
        return self._store.get_range(key, start, length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_store_that_fails_then_stops_nobody(store, clock):
    deaf = Deaf(store)
    (site,) = signed_sites(deaf, clock, "a", quorum=1)  # type: ignore[arg-type]
    play_round(clock, [site], apart(0))
    deaf.is_deaf = True
    site.courier.finish()
    assert deaf.num_reads > 1 and told(site, "equivocated") == []


def test_without_keys_no_offer_is_read_a_second_time(clock):
    def reads(name: str, key: SigningKey | None) -> int:
        store = Deaf(open_store(f"memory://{name}"))
        founding = Founding(keys={"a": key.public}) if key else Founding()
        site = HandSite(store, make_terms(fragments=1, rounds=9), "a", clock, key=key, founding=founding)  # type: ignore[arg-type]
        for version in range(3):
            play_round(clock, [site], apart(version))
        site.courier.finish()
        return store.num_reads

    assert reads("unsigned-rounds", None) == 3
    assert reads("signed-rounds", SIGNING["a"]) == 3 + 2 + 3  # by the committer, when the next had closed, at the end


def test_where_a_store_lets_two_win_a_second_processs_record_is_no_second_word(store, clock):
    sites = signed_sites(store, clock)
    play_round(clock, sites, apart(0))
    taken = read_record(store, Offer, keys.offer(0, 0, "c"))
    again, successors = (taken.model_copy(update=change) for change in ({"tokens": 5}, {"incarnation": 1}))
    assert [is_second_record(one, taken, is_atomic=True) for one in (taken, again, successors)] == [False, True, True]
    assert [is_second_record(one, taken, is_atomic=False) for one in (again, successors)] == [True, False]
