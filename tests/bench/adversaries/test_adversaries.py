"""The adversaries' bench: every kind is refused by name or bounded, no honest offer is refused, and a hole is seen."""

import threading
from dataclasses import replace

import pytest

from composer_prime.errors import BadInput
from composer_prime.store import open_store
from composer_prime.sync.merging import Merger
from composer_prime.sync.records import Commit, Offer
from composer_prime.sync.rounds import RoundCloser
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.bench.adversaries.adversaries import describe_pairs, main
from tests.bench.adversaries.audit import Audit, audit
from tests.bench.adversaries.crowd import CrowdPlan, crowd_plans, judge_crowd
from tests.bench.adversaries.kinds import KINDS
from tests.bench.adversaries.site import HostilePlan, harass, read_book
from tests.patience import PATIENCE_S
from tests.sync.harness import ThreadSite, make_terms, run_sites

TAKEN_BUT_BOUNDED = {"scale x1000", "sign flip", "equivocation"}
FOUND_BY_THE_PARTS = {"NaN", "decompression bomb", "half-uploaded"}
"""In a round of parts no payload is read before the commit: these may be taken, and left out of some parts or all."""
GATHERED = CrowdPlan("int8", "clipped", rounds=14, seed=1)
IN_PARTS = replace(GATHERED, gather_sites=4)


@pytest.mark.parametrize(
    "plan", [GATHERED, replace(GATHERED, codec="topk", aggregate="clipped"), IN_PARTS], ids=lambda plan: plan.title
)
def test_every_kind_is_refused_or_bounded_and_no_honest_offer_is_refused(plan: CrowdPlan):
    found = judge_crowd(plan)
    assert found.complaints == []
    assert found.honest_offers == found.honest_taken == 7 * 15
    assert found.cut == (found.rounds if plan is IN_PARTS else 0)
    for kind, tally in found.kinds.items():
        assert tally.made >= 2, kind
        assert tally.made == tally.refused + tally.bounded and tally.unseen == 0, kind
        if kind in TAKEN_BUT_BOUNDED:
            assert tally.refused == 0, kind
        elif plan is not IN_PARTS or kind not in FOUND_BY_THE_PARTS:
            assert tally.bounded == 0, kind
        assert kind in TAKEN_BUT_BOUNDED or tally.whys, kind


def test_an_honest_offer_left_out_of_a_part_is_a_complaint(monkeypatch: pytest.MonkeyPatch):
    read = Merger._read_slices

    def misread(self: Merger, offer: Offer, index: int, commit: Commit):
        return "lost" if (offer.site, index) == ("c", 2) else read(self, offer, index, commit)

    monkeypatch.setattr(Merger, "_read_slices", misread)
    found = judge_crowd(replace(IN_PARTS, rounds=2))
    assert any(complaint.startswith("honest offer refused: c in part 2 of round") for complaint in found.complaints)


def test_an_honest_offer_that_loses_to_its_copy_is_a_complaint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RoundCloser, "_by_standing", lambda self, offers, replica: dict(sorted(offers.items())))
    found = judge_crowd(GATHERED)
    assert any("a copy" in complaint for complaint in found.complaints)


@pytest.mark.parametrize("gather_sites", [16, 4])
def test_without_a_rule_that_bounds_a_thousandfold_offer_is_a_complaint(gather_sites: int):
    found = judge_crowd(CrowdPlan("int8", "mean", rounds=6, seed=0, gather_sites=gather_sites))
    assert any("scale x1000" in complaint and "too much weight" in complaint for complaint in found.complaints)


def test_the_crowds_runs_make_at_least_the_offers_asked_for_by_every_rule():
    plans = crowd_plans(10_000, 7, 3)
    assert sum(plan.honest * plan.rounds for plan in plans) >= 10_000
    assert len({plan.seed for plan in plans}) == len(plans)
    assert {plan.title for plan in plans} == {
        "int8, clipped, gathered",
        "topk, clipped, gathered",
        "int8, clipped, in parts above 4 offers",
    }


@pytest.mark.parametrize("kinds", [tuple(KINDS), ("sign flip",)], ids=["all", "one"])
def test_an_adversary_beside_running_sites_leaves_a_book_of_its_kinds_and_equal_masters(tmp_path, kinds):
    signing = {name: SigningKey.generate() for name in ("a", "b", "0-eve")}
    founding = Founding(keys={name: key.public for name, key in signing.items()})
    signing["0-eve"].save(tmp_path / "eve.key")
    uri = str(tmp_path / "bucket")
    terms = make_terms(grace_s=1.0, liveness_s=5.0, rounds=4, aggregate="clipped", weighting="equal")
    sites = [
        ThreadSite(open_store(uri), terms, name, data_seed=index, key=signing[name], founding=founding)
        for index, name in enumerate("ab")
    ]
    plan = HostilePlan(uri, "0-eve", str(tmp_path / "eve.key"), ["a", "b"], 0, 0, str(tmp_path / "book.jsonl"), kinds)
    eve = threading.Thread(target=harass, args=(plan,), daemon=True)
    eve.start()
    run_sites(*sites)
    eve.join(PATIENCE_S)
    assert not eve.is_alive()
    assert sites[0].summary["masters"] == sites[1].summary["masters"]
    book = read_book(tmp_path / "book.jsonl")
    assert len(book) > 1 and (len({deed.kind for deed in book}) == 1) == (len(kinds) == 1)
    found = audit(open_store(uri), ["a", "b"], book)
    assert found.honest_refused == [] and found.unbounded == []


def test_an_unknown_kind_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(BadInput, match="--kind 'sign flop' isn't one of scale x1000, sign flip, "):
        main(tmp_path / "none.toml", [0], 8, 7, 3, 0, tmp_path, ["sign flip", "sign flop"])


def test_audits_add_up():
    one, other = Audit(honest_offers=3, rounds=1), Audit(honest_offers=4, honest_refused=["x"], rounds=2)
    other.kinds["NaN"].made = 2
    one.add(other)
    assert (one.honest_offers, one.rounds, one.kinds["NaN"].made) == (7, 3, 2)
    assert one.complaints == ["honest offer refused: x"] and not one.is_clean
    assert set(one.kinds) == set(KINDS) and len(KINDS) == 12


def test_paired_differences_come_with_students_interval():
    pairs = [(0.90, 0.91), (0.92, 0.90), (0.95, 0.95), (0.94, 0.95), (0.96, 0.94)]
    told = describe_pairs(pairs)
    assert told.startswith("harmed minus clean: +0.0100, -0.0200, +0.0000, +0.0100, -0.0200; mean -0.0040")
    assert told.endswith("95 % interval -0.0228 to +0.0148")
    assert "no interval" in describe_pairs(pairs[:1])
