"""Rule 14: in a run that admits keys, what isn't signed by its site counts for nothing."""

import pytest
import torch

from composer_prime.errors import ConfigError
from composer_prime.store import keys
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Beat, Claim, Commit, Manifest, Offer
from composer_prime.sync.roster import Roster
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.sync.harness import HandSite, ThreadSite, make_terms, run_sites


@pytest.fixture
def signing():
    return {name: SigningKey.generate() for name in "abc"}


@pytest.fixture
def founding(signing):
    return Founding(keys={name: key.public for name, key in signing.items()})


def closing(clock, *sites: HandSite) -> None:
    for _ in range(4):
        for site in sites:
            site.tick()
        clock[0] += 1.0


def test_sites_with_admitted_keys_train_as_any_others(store, signing, founding):
    sites = [
        ThreadSite(store, make_terms(), name, data_seed=index, key=signing[name], founding=founding)
        for index, name in enumerate("ab")
    ]
    run_sites(*sites)
    assert sites[0].summary["masters"] == sites[1].summary["masters"]
    assert (
        read_record(store, Commit, keys.commit(0, 0)).signature
        and read_record(store, Beat, keys.beat("a", 0)).signature
    )


@pytest.mark.parametrize(
    ("site", "key", "word"), [("a", None, "key_file"), ("a", "b", "admitted with"), ("z", "a", "not admitted")]
)
def test_a_process_without_the_admitted_key_of_its_name_is_refused_before_it_writes(
    store, clock, signing, founding, site, key, word
):
    HandSite(store, make_terms(), "b", clock, key=signing["b"], founding=founding)
    with pytest.raises(ConfigError, match=word):
        HandSite(store, make_terms(), site, clock, key=signing.get(key), founding=founding)
    assert not store.list(keys.site_prefix(site))


@pytest.mark.parametrize("forgery", ["unsigned", "other key", "edited", "other run"])
def test_an_offer_without_its_sites_signature_is_refused(store, clock, signing, founding, forgery):
    a, b = (
        HandSite(store, make_terms(grace_s=2.0), name, clock, key=signing[name], founding=founding) for name in "ab"
    )
    a.hand_over(0, 1.0)
    b.hand_over(0, 2.0)
    for site in (a, b):
        site.runtime.run_tasks()
        site.courier._bring(0)
    key = keys.offer(0, 0, "b")
    record = read_record(store, Offer, key)
    if forgery == "unsigned":
        record = record.model_copy(update={"signature": None})
    elif forgery == "other key":
        record = record.model_copy(update={"signature": signing["c"].sign(record.message(b.run.sha256))})
    elif forgery == "edited":
        record = record.model_copy(update={"tokens": 9})
    else:
        record = record.model_copy(update={"signature": signing["b"].sign(record.message("0" * 64))})
    store.put(key, record.to_bytes())
    closing(clock, a)
    closing(clock, a)
    commit = read_record(store, Commit, keys.commit(0, 0))
    assert [entry.site for entry in commit.taken] == ["a"]
    assert [entry.site for entry in commit.refused] == ["b"] and "sign" in commit.refused[0].why


def test_an_outsider_can_neither_pose_as_live_nor_take_a_name_over(store, clock, signing, founding):
    a = HandSite(store, make_terms(), "a", clock, key=signing["a"], founding=founding)
    beat = Beat(
        site="b", incarnation=0, counter=1, state="live", versions=(0, 0), inner_step=0, trained_tokens=0, pins=(0, 0)
    )
    store.create(keys.claim("b", 0), Claim(site="b", incarnation=0, nonce="", host="", pid=1).to_bytes())
    store.put(keys.beat("b", 0), beat.to_bytes())
    store.create(keys.claim("a", 7), Claim(site="a", incarnation=7, nonce="", host="", pid=1).to_bytes())
    members = a.courier._members
    members.observe()
    assert members.live(0.0) == {"a"}
    a.pulse.check()  # no Superseded


def test_an_offer_of_a_process_that_was_replaced_is_refused_once_its_successor_beats(store, clock):
    a, old = (HandSite(store, make_terms(grace_s=1.0), name, clock) for name in "ab")
    old.hand_over(0, 2.0)
    old.runtime.run_tasks()
    old.courier._bring(0)
    HandSite(store, make_terms(grace_s=1.0), "b", clock)
    a.hand_over(0, 1.0)
    closing(clock, a)
    clock[0] += 100.0
    a.beat()
    closing(clock, a)
    commit = read_record(store, Commit, keys.commit(0, 0))
    assert [entry.site for entry in commit.taken] == ["a"] and "has taken over" in commit.refused[0].why


def test_an_offer_of_a_process_that_was_replaced_holds_no_round_up(store, clock):
    terms = make_terms(quorum=2, grace_s=1.0)
    a, old, silent = (HandSite(store, terms, name, clock) for name in "abc")
    old.hand_over(0, 2.0)
    old.runtime.run_tasks()
    old.courier._bring(0)
    new = HandSite(store, terms, "b", clock)  # it can offer nothing: the key is taken
    a.hand_over(0, 1.0)
    for _ in range(3):
        for site in (a, new, silent):
            site.beat()
        closing(clock, a)
    commit = read_record(store, Commit, keys.commit(0, 0))
    assert commit.taken == () and [entry.site for entry in commit.refused] == ["b"]
    settled = a.courier.collect(0)[1]
    assert settled is not None and settled.outcome in ("missed", "void"), "a keeps its work, for the next round"


def test_an_understated_norm_is_found_when_the_payload_is_decoded(store, clock):
    a, b = (HandSite(store, make_terms(grace_s=1.0, aggregate="clipped"), name, clock) for name in "ab")
    b.hand_over(0, 1000.0)
    b.runtime.run_tasks()
    b.courier._bring(0)
    key = keys.offer(0, 0, "b")
    record = read_record(store, Offer, key)
    store.put(key, record.model_copy(update={"norms": (record.norms[0] / 1000,) * len(record.norms)}).to_bytes())
    a.hand_over(0, 1.0)
    closing(clock, a)
    closing(clock, a)
    commit = read_record(store, Commit, keys.commit(0, 0))
    assert [entry.site for entry in commit.taken] == ["a"] and "norm" in commit.refused[0].why


def test_clipped_offers_of_a_thousand_times_the_norm_move_a_master_no_more_than_honest_ones(store, clock):
    terms = make_terms(aggregate="clipped", clip=1.0, weighting="equal")
    a, b, c = (HandSite(store, terms, name, clock) for name in "abc")
    start = a.courier.master(0).weights
    for site, value in ((a, 1.0), (b, 1.1), (c, 1000.0)):
        site.hand_over(0, value)
    closing(clock, a, b, c)
    moved = (start - a.courier.master(0).weights).abs().max()
    assert a.courier.versions()[0] == 1 and float(moved) <= 1.1 + 1e-4


@pytest.mark.parametrize("copycat", ["0", "z"])
def test_of_two_equal_offers_that_of_the_site_whose_work_was_merged_before_counts(store, clock, copycat):
    names = ("a", "b", copycat)
    a, b, thief = (HandSite(store, make_terms(grace_s=1.0), name, clock) for name in names)
    generator = torch.Generator().manual_seed(1)
    for version in range(2):
        for site in (a, b):
            site.beat()
            movement = torch.randn(a.replicas[0].numel, generator=generator)
            site.hand_over(0, movement)
        if version:
            thief.hand_over(0, movement)  # b's
        for site in (thief, b):
            site.runtime.run_tasks()
            site.courier._bring(0)
        for _ in range(3):
            closing(clock, a)
        for site in (a, b, thief):
            site.courier.follow()
            site.courier.collect(0)
    commit = read_record(store, Commit, keys.commit(0, 1))
    assert [entry.site for entry in commit.taken] == ["a", "b"]
    assert [(entry.site, entry.why) for entry in commit.refused] == [(copycat, "equals the offer of b: a copy")]


def test_a_run_without_keys_signs_nothing(store, clock):
    a = HandSite(store, make_terms(), "a", clock)
    assert not a.roster.signed and read_record(store, Beat, keys.beat("a", 0)).signature is None
    manifest = read_record(store, Manifest, keys.manifest())
    assert Roster(store, manifest, a.run.sha256).fault(read_record(store, Beat, keys.beat("a", 0)), "a") is None
