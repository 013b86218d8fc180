"""One record, put where it doesn't belong or in a form that no site writes, stops nobody and takes nobody's place."""

import json

import pytest
import torch

from composer_prime.errors import CorruptObject
from composer_prime.store import Store, keys
from composer_prime.sync.canonical import canonical, sha256_hex
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Close, Commit, Offer, Part, Refused
from composer_prime.sync.returning import own_past
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.snapshots import vouched_sha
from composer_prime.sync.start import Founding
from tests.sync.harness import HandSite, empty_commit, make_terms
from tests.sync.test_many_sites import Crowd, terms_of

KEYS = {name: SigningKey.from_bytes(name.encode() * 32) for name in "ab"}
FOUNDING = Founding(keys={name: key.public for name, key in KEYS.items()})


def committed(store: Store) -> tuple[Crowd, Commit]:
    """Six sites whose round is committed in parts, none of which is merged yet."""
    crowd = Crowd(store, terms_of("fp32", merged_codec="fp32", slices=6), 6, 600)
    crowd.look_around()
    for index, site in enumerate(crowd.sites):
        site.hand_over(0, torch.ones(600) * (1 + index))
        site.runtime.run_tasks()
        site.courier._bring(0)
    while not store.list(keys.commit(0, 0)):
        for site in crowd.sites:
            if not store.list(keys.commit(0, 0)):
                site.courier._closer.serve(site.replicas[0])
        crowd.clock[0] += 1.0
    return crowd, read_record(store, Commit, keys.commit(0, 0))


@pytest.mark.parametrize("kind", ["a hash that is none", "half a hash", "a payload of nobody"])
def test_a_part_that_no_site_writes_is_a_part_of_zeros_for_everybody(store, kind):
    crowd, commit = committed(store)
    sha = {"a hash that is none": "zz", "half a hash": "a" * 32, "a payload of nobody": "a" * 64}[kind]
    nobody = tuple(Refused(site=entry.site, why="so") for entry in commit.taken)
    record = Part(
        fragment=0,
        version=0,
        part=2,
        commit_sha=sha256_hex(commit.to_bytes()),
        excluded=nobody if kind == "a payload of nobody" else (),
        payload=None,
        sha256=None,
        nbytes=400,
        reducer="s03",
    )
    named = {"payload": keys.merged_payload(0, 0, 2, "a" * 64), "sha256": sha}
    store.create(keys.merged(0, 0, 2), canonical(record.model_dump(mode="json") | named))
    for _ in range(12):
        for site in crowd.sites:
            site.courier.tick()
        crowd.clock[0] += 1.0
    assert {site.courier.versions()[0] for site in crowd.sites} == {1} and len(crowd.masters()) == 1
    weights = crowd.sites[0].courier.master(0).weights
    assert weights[200:300].eq(0).all() and weights[:200].ne(0).all() and weights[300:].ne(0).all()


def test_a_close_record_that_names_fewer_masters_than_fragments_vouches_for_nothing(store, clock):
    site = HandSite(store, make_terms(), "a", clock)
    store.create(
        keys.close(),
        Close(number=0, versions=(4,), masters=("1" * 64,), voids=((),), floors=(0,), closed_by="a").to_bytes(),
    )
    assert site.run.ends == (4,) and vouched_sha(store, site.run, site.roster, 0, 4) is None


def test_a_copy_of_a_sites_own_claim_under_a_later_number_takes_nothing_over(store, clock):
    a, b = (HandSite(store, make_terms(), name, clock, key=KEYS[name], founding=FOUNDING) for name in "ab")
    store.create(keys.claim("a", 7), store.get(keys.claim("a", 0)))
    a.pulse.check()  # no Superseded
    b.courier._members.observe()
    assert "a" in b.courier._members.live(0.0) and b.courier._members.incarnation("a") == 0


@pytest.mark.parametrize("rubbish", [b"", b"\x00garbage", b"{}", b'{"site":"a"'])
def test_a_claim_that_is_no_record_takes_nothing_over(store, clock, rubbish):
    a, b = (HandSite(store, make_terms(), name, clock, key=KEYS[name], founding=FOUNDING) for name in "ab")
    store.create(keys.claim("a", 7), rubbish)
    a.pulse.check()  # no Superseded
    b.courier._members.observe()
    assert "a" in b.courier._members.live(0.0) and b.courier._members.incarnation("a") == 0


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rubbish", [b"", b"\x00garbage", b"{}", b'{"site":"b"'])
def test_an_offer_that_is_no_record_is_refused_by_name_and_the_round_closes_without_it(store, clock, rubbish, signed):
    known, founding = (KEYS, FOUNDING) if signed else ({}, Founding())
    sites = [HandSite(store, make_terms(), name, clock, key=known.get(name), founding=founding) for name in "ab"]
    sites[0].hand_over(0, 1.0)
    store.create(keys.offer(0, 0, "b"), rubbish)
    for _ in range(12):
        for site in sites:
            site.tick()
        clock[0] += 1.0
    commit = read_record(store, Commit, keys.commit(0, 0))
    assert [entry.offer.site for entry in commit.taken] == ["a"] and [entry.site for entry in commit.refused] == ["b"]
    assert [site.courier.versions()[0] for site in sites] == [1, 1]


def test_a_copy_of_a_sites_own_offer_in_a_later_round_is_none_of_its_offers(store, clock):
    a = HandSite(store, make_terms(), "a", clock, key=KEYS["a"], founding=FOUNDING)
    a.hand_over(0, 1.0)
    a.runtime.run_tasks()
    a.courier._bring(0)
    a.replicas[0].master = a.replicas[0].master.unchanged()
    store.create(keys.offer(0, 1, "a"), store.get(keys.offer(0, 0, "a")))
    past = own_past(store, a.runtime, a.roster, a.run.terms, a.replicas[0], "a", 1)
    assert past.newest is None and not past.open


@pytest.mark.parametrize("signed", [False, True])
def test_offers_that_are_not_of_that_round_make_no_site_doubt_its_own_master(store, clock, signed):
    """A commit that is void, and offers on another master, made up or copied: it would stop as the odd one out."""
    a = HandSite(store, make_terms(), "a", clock, key=KEYS["a"], founding=FOUNDING)
    a.hand_over(0, 1.0)
    a.runtime.run_tasks()
    a.courier._bring(0)
    offer = read_record(store, Offer, keys.offer(0, 0, "a"))
    for name in ("b",) if signed else ("x", "y", "z"):
        other = offer.model_copy(update={"site": name, "base_sha": "f" * 64, "version": 7 if signed else 0})
        if signed:
            other = other.model_copy(update={"signature": KEYS["b"].sign(other.message(a.run.sha256))})
        store.create(keys.offer(0, 0, name), other.to_bytes())
    unsigned = empty_commit(base_sha="f" * 64, previous=a.run.sha256)
    store.create(keys.commit(0, 0), unsigned.to_bytes())
    a.courier.follow()
    assert a.replicas[0].version == 1 and a.replicas[0].history.voids == (0,)


@pytest.mark.parametrize(
    "other",
    [
        lambda text: text.replace(",", ", "),
        lambda text: text.replace('"version":3', '"version":"3"'),
        lambda text: text.replace('"version":3', '"version":3.0'),
        lambda text: text.replace('"version":3', '"version":2,"version":3'),
        lambda text: text.replace('"voids":[]', '"voids": []'),
        lambda text: text.replace(',"admissions":0', ""),
        lambda text: json.dumps(dict(reversed(json.loads(text).items())), separators=(",", ":")),
    ],
)
def test_a_record_has_one_form_and_in_any_other_it_is_not_read(other):
    record = empty_commit(version=3, base_sha="0" * 64, previous="1" * 64)
    text = record.to_bytes().decode()
    assert Commit.from_bytes(text.encode(), "commit") == record and other(text) != text
    with pytest.raises(CorruptObject, match=r"^commit "):
        Commit.from_bytes(other(text).encode(), "commit")
