"""Rule 10: rounds of many sites are cut into parts, so that the wire stays small however many take part."""

from collections.abc import Collection

import pytest
import torch
from torch import nn

from composer_prime.errors import StoreError
from composer_prime.store import keys, open_store
from composer_prime.sync.merging import NOT_CODED
from composer_prime.sync.metered import MeteredStore
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Offer, Part
from composer_prime.sync.replica import Replica
from composer_prime.sync.snapshots import load_master, store_master
from composer_prime.sync.terms import Terms
from composer_prime.sync.verifying import Verifier
from tests.sync.harness import HandSite, commit_of, make_terms


class Crowd:
    """Many sites of one fragment, each with a meter of its own, on one clock."""

    def __init__(self, store, terms: Terms, num_sites: int, numel: int) -> None:
        self.store, self.clock = store, [0.0]
        self.meters = [MeteredStore(store) for _ in range(num_sites)]
        net = nn.Linear(numel, 1, bias=False)
        nn.init.zeros_(net.weight)
        self.sites = [
            HandSite(meter, terms, f"s{index:02d}", self.clock, net=net) for index, meter in enumerate(self.meters)
        ]
        self.num_rounds = 0

    def look_around(self) -> None:
        for site in self.sites:
            site.beat()
            site.courier._look_at_members(self.clock[0])

    def pass_on(self, passes: int = 1) -> None:
        """Passes of all sites, a second each."""
        for _ in range(passes):
            for site in self.sites:
                site.courier.tick()
            self.clock[0] += 1.0

    def round(self, but: Collection[int] = ()) -> None:
        """One round of all sites but some, which are silent; each moves at random."""
        self.num_rounds += 1
        active = [site for index, site in enumerate(self.sites) if index not in but]
        for index, site in enumerate(active):
            generator = torch.Generator().manual_seed(1000 * self.num_rounds + index)
            site.hand_over(0, torch.randn(site.replicas[0].numel, generator=generator))
        for site in active:
            site.runtime.run_tasks()
        for _ in range(12):
            for site in active:
                site.courier.tick()
            if all(site.courier.versions()[0] == self.num_rounds for site in active):
                break
            self.clock[0] += 1.0
        assert {site.courier.versions()[0] for site in active} == {self.num_rounds}
        for site in active:
            settled = site.courier.collect(0)[1]
            assert settled is not None and settled.outcome == "taken"

    def payload_bytes(self) -> int:
        return read_record(self.store, Offer, keys.offer(0, self.num_rounds - 1, "s00")).nbytes

    def masters(self) -> set[str]:
        return {site.courier.master(0).sha256 for site in self.sites}


def terms_of(codec: str, **changes) -> Terms:
    return make_terms(
        **{"fragments": 1, "codec": codec, "rounds": 9, "snapshot_rounds": 100, "liveness_s": 1e6, **changes}
    )


def traffic_of_a_round(crowd: Crowd) -> tuple[float, float]:
    """(most uploaded, most downloaded) by any site in one round, in payloads."""
    crowd.look_around()
    crowd.round()
    before = [meter.traffic() for meter in crowd.meters]
    crowd.round()
    after = [meter.traffic() for meter in crowd.meters]
    size = crowd.payload_bytes()
    ups = [now.bytes_up - was.bytes_up for now, was in zip(after, before, strict=True)]
    downs = [now.bytes_down - was.bytes_down for now, was in zip(after, before, strict=True)]
    return max(ups) / size, max(downs) / size


WIRE = 4_000_000
"""Values of a fragment from which the bounds hold: in smaller ones the records, 4.7 kB an offer, weigh more."""
MOST = {"int8": (1.3, 2.3), "int4": (1.6, 3.3)}
"""Payloads that a site uploads and downloads in a round at most; int4's parts are merged in int8."""


@pytest.mark.parametrize(("codec", "num_sites"), [("int8", 5), ("int8", 31), ("int4", 12)])
def test_a_site_moves_a_few_payloads_a_round_however_many_sites_there_are(store, codec, num_sites):
    check_traffic(store, codec, num_sites)


@pytest.mark.long
@pytest.mark.parametrize("num_sites", range(5, 33))
@pytest.mark.parametrize("codec", MOST)
def test_a_site_moves_a_few_payloads_a_round_with_every_number_of_sites(store, codec, num_sites):
    check_traffic(store, codec, num_sites)


def check_traffic(store, codec: str, num_sites: int) -> None:
    crowd = Crowd(store, terms_of(codec), num_sites, WIRE)
    moved = traffic_of_a_round(crowd)
    print(f"{codec}, {num_sites} sites: up {moved[0]:.3f}, down {moved[1]:.3f} payloads")
    assert all(most >= share for most, share in zip(MOST[codec], moved, strict=True)), moved
    assert len(crowd.masters()) == 1


@pytest.mark.parametrize("aggregate", ["mean", "clipped"])
def test_merging_in_parts_gives_what_gathering_gives_but_for_the_parts_int8(aggregate):
    def master(name: str, gather_sites: int) -> torch.Tensor:
        terms = terms_of("fp32", gather_sites=gather_sites, aggregate=aggregate)
        crowd = Crowd(open_store(f"memory://{name}-{aggregate}"), terms, 7, 1000)
        crowd.look_around()
        crowd.round()
        assert len(crowd.masters()) == 1
        return crowd.sites[0].courier.master(0).weights

    gathered, parts = master("gathered", 7), master("parts", 4)
    for start in range(0, 1000, 256):  # a block of int8
        whole = gathered[start : start + 256]
        assert (whole - parts[start : start + 256]).abs().max() <= whole.abs().max() / 250
    assert not torch.equal(gathered, parts)


def test_a_part_whose_reducer_has_died_is_merged_by_another_site(store):
    crowd = Crowd(store, terms_of("fp32", grace_s=3.0, liveness_s=10.0), 6, 600)
    crowd.look_around()
    for site in crowd.sites:
        site.offer(0, torch.randn(600))
    dead, alive = crowd.sites[0], crowd.sites[1:]
    for _ in range(20):
        for site in alive:
            site.courier.tick()
        crowd.clock[0] += 1.0
    assert {site.courier.versions()[0] for site in alive} == {1}
    commit = commit_of(store)
    assert len(commit.taken) == 6, "what the dead site had offered counts"
    dead.courier.tick()
    assert len(crowd.masters()) == 1


@pytest.mark.parametrize("damage", ["flipped", "absent", "longer"])
def test_an_offer_that_is_damaged_in_one_part_is_left_out_of_that_part_by_its_record(store, damage):
    crowd = Crowd(store, terms_of("fp32", slices=6), 6, 6 * 256)
    crowd.look_around()
    for site in crowd.sites:
        site.offer(0, torch.ones(6 * 256) * (1 + int(site.name[1:])))
    offer = read_record(store, Offer, keys.offer(0, 0, "s02"))
    assert offer.payload is not None
    data = bytearray(store.get(offer.payload))
    data[4 * 600] ^= 1
    if damage == "flipped":
        store.put(offer.payload, bytes(data))
    elif damage == "longer":
        data[4 * 600] ^= 1
        store.put(offer.payload, bytes(data) + b"x")
    else:
        store.delete(offer.payload)
    crowd.pass_on(12)
    parts = [read_record(store, Part, keys.merged(0, 0, index)) for index in range(6)]
    excluded = [[entry.site for entry in part.excluded] for part in parts]
    knows_own = [index for index, part in enumerate(parts) if part.reducer == "s02"]
    for index in set(range(6)) - set(knows_own):
        damaged = {"flipped": index == 2, "absent": True, "longer": index == 5}[damage]
        assert excluded[index] == (["s02"] if damaged else [])
    assert len(crowd.masters()) == 1
    moved = -crowd.sites[0].courier.master(0).weights
    sound, left_out = sum(range(1, 7)) / 6, (sum(range(1, 7)) - 3) / 5
    for index in range(6):
        wanted = left_out if excluded[index] else sound
        torch.testing.assert_close(
            moved[256 * index : 256 * index + 256], torch.full((256,), wanted), rtol=1e-4, atol=0
        )


def parts_of_a_round(store, excluding: bool = False, **changes: bool) -> tuple[Crowd, list[Part]]:
    """Six sites up to the moment when every part of their round is merged, and some have read none of them.

    excluding   whether one offer is damaged, so that the parts leave it out
    """
    crowd = Crowd(store, terms_of("fp32", slices=6, **changes), 6, 6 * 256)
    crowd.look_around()
    for index, site in enumerate(crowd.sites):
        site.offer(0, torch.randn(6 * 256, generator=torch.Generator().manual_seed(index)))
    if excluding:
        store.put(read_record(store, Offer, keys.offer(0, 0, "s02")).payload, b"nothing of it")
    records = [keys.merged(0, 0, index) for index in range(6)]
    for turn in range(60):
        if all(store.list(record) for record in records):
            break
        crowd.sites[turn % 6].courier.tick()
        crowd.clock[0] += 1.0
    assert {site.courier.versions()[0] for site in crowd.sites} == {0, 1}
    return crowd, [read_record(store, Part, record) for record in records]


@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("damage", ["flipped", "absent"])
def test_a_merged_payload_that_is_damaged_is_made_anew_from_the_offers_in_it_and_put_back(store, damage, excluding):
    crowd, parts = parts_of_a_round(store, excluding)
    place = next(index for index, part in enumerate(parts) if bool(part.excluded) == excluding)
    payload = parts[place].payload
    sound = store.get(payload)
    store.delete(payload)
    if damage == "flipped":
        store.put(payload, sound[:-1] + bytes([sound[-1] ^ 1]))
    crowd.pass_on()
    assert {site.courier.versions()[0] for site in crowd.sites} == {1} and len(crowd.masters()) == 1
    assert store.get(payload) == sound


def test_a_merged_payload_is_waited_for_while_an_offer_in_it_is_gone_too(store):
    crowd, parts = parts_of_a_round(store)
    behind = next(site for site in crowd.sites if site.courier.versions()[0] == 0)
    part = next(part for part in parts if part.payload is not None and part.reducer != behind.name)
    other = next(site.name for site in crowd.sites if site is not behind)
    offered = read_record(store, Offer, keys.offer(0, 0, other)).payload
    kept = store.get(offered)
    for key in (part.payload, offered):
        store.delete(key)
    with pytest.raises(StoreError, match=part.payload):
        behind.courier.tick()
    store.put(offered, kept)
    crowd.pass_on()
    assert behind.courier.versions() == (1,) and len(crowd.masters()) == 1


def test_values_that_have_no_code_once_they_are_merged_make_a_part_of_zeros_and_stop_nobody(store):
    """As sites may send that mean harm: of ten times the largest float the mean rounds to infinity."""
    crowd = Crowd(store, terms_of("fp32", slices=10), 10, 10 * 256)
    crowd.look_around()
    for index, site in enumerate(crowd.sites):
        values = torch.full((10 * 256,), 1.0 + index)
        values[:256] = torch.finfo(torch.float32).max
        site.offer(0, values)
    crowd.pass_on(12)
    parts = [read_record(store, Part, keys.merged(0, 0, index)) for index in range(10)]
    everyone = [f"s{index:02d}" for index in range(10)]
    assert parts[0].payload is None and [entry.site for entry in parts[0].excluded] == everyone
    assert {entry.why for entry in parts[0].excluded} == {NOT_CODED}
    assert all(part.payload is not None and not part.excluded for part in parts[1:])
    assert len(crowd.masters()) == 1 and crowd.sites[0].courier.versions() == (1,)
    assert float(crowd.sites[0].courier.master(0).weights[:256].abs().max()) == 0.0
    verifier = Verifier(store)
    assert verifier.check(0).num_parts == 10
    verifier.close()


def test_who_only_follows_goes_on_from_a_snapshot_when_the_parts_it_waits_for_were_collected(store):
    """It merges no part, and so it can't find out by trying."""
    crowd, _ = parts_of_a_round(store, keep_log=False)
    first = crowd.sites[0].run.manifest.masters[0]
    start = load_master(store, crowd.sites[0].run, 0, 0, first)
    crowd.pass_on(4)
    for site in crowd.sites:
        site.courier.collect(0)
    crowd.num_rounds = 1
    for _ in range(2):
        crowd.round()
        store_master(store, crowd.sites[0].courier.master(0))
    crowd.round()
    for key in store.list("rounds/0000/00000000/merged/"):
        store.delete(key)
    site = crowd.sites[0]
    follower = Replica(store, site.run, 0, runtime=site.runtime, roster=site.roster, site="", start=start)
    assert follower.advance() == []
    crowd.clock[0] += site.run.terms.grace_s + 1.0
    assert [closed.version for closed in follower.advance()] == [0, 1, 2] and follower.version == 3
