"""The adversaries' bench: every kind is refused by name or bounded, no honest offer is refused, and a hole is seen."""

import threading

import pytest

from composer_prime.bench.adversaries import describe_pairs
from composer_prime.bench.adversary_audit import Audit, audit
from composer_prime.bench.adversary_crowd import CrowdPlan, crowd_plans, judge_crowd
from composer_prime.bench.adversary_kinds import KINDS
from composer_prime.bench.adversary_site import HostilePlan, harass, read_book
from composer_prime.store import open_store
from composer_prime.sync.rounds import RoundCloser
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.sync.harness import ThreadSite, make_terms, run_sites

TAKEN_BUT_BOUNDED = {"scale x1000", "sign flip", "equivocation"}


@pytest.mark.parametrize(("codec", "aggregate"), [("int8", "trimmed"), ("topk", "clipped")])
def test_every_kind_is_refused_by_name_or_bounded_and_no_honest_offer_is_refused(codec: str, aggregate: str):
    found = judge_crowd(CrowdPlan(codec, aggregate, rounds=14, seed=1))
    assert found.complaints == []
    assert found.honest_offers == found.honest_taken == 7 * 15
    for kind, tally in found.kinds.items():
        assert tally.made >= 2, kind
        assert tally.made == (tally.bounded if kind in TAKEN_BUT_BOUNDED else tally.refused), kind
        assert kind in TAKEN_BUT_BOUNDED or tally.whys, kind


def test_an_honest_offer_that_loses_to_its_copy_is_a_complaint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RoundCloser, "_by_standing", lambda self, offers, replica: dict(sorted(offers.items())))
    found = judge_crowd(CrowdPlan("int8", "trimmed", rounds=14, seed=1))
    assert any("a copy" in complaint for complaint in found.complaints)


def test_without_a_rule_that_bounds_a_thousandfold_offer_is_a_complaint():
    found = judge_crowd(CrowdPlan("int8", "mean", rounds=6, seed=0))
    assert any("scale x1000" in complaint and "too much weight" in complaint for complaint in found.complaints)


def test_the_crowds_runs_make_at_least_the_offers_asked_for():
    plans = crowd_plans(10_000, 7, 3)
    assert sum(plan.honest * plan.rounds for plan in plans) >= 10_000
    assert {plan.codec for plan in plans} == {"int8", "topk"} and len({plan.seed for plan in plans}) == len(plans)


def test_an_adversary_beside_running_sites_leaves_a_book_and_equal_masters(tmp_path):
    signing = {name: SigningKey.generate() for name in ("a", "b", "0-eve")}
    founding = Founding(keys={name: key.public for name, key in signing.items()})
    signing["0-eve"].save(tmp_path / "eve.key")
    uri = str(tmp_path / "bucket")
    terms = make_terms(grace_s=1.0, liveness_s=5.0, rounds=4, aggregate="clipped", weighting="equal")
    sites = [
        ThreadSite(open_store(uri), terms, name, data_seed=index, key=signing[name], founding=founding)
        for index, name in enumerate("ab")
    ]
    plan = HostilePlan(uri, "0-eve", str(tmp_path / "eve.key"), ["a", "b"], 0, 0, str(tmp_path / "book.jsonl"))
    eve = threading.Thread(target=harass, args=(plan,), daemon=True)
    eve.start()
    run_sites(*sites)
    eve.join(30)
    assert not eve.is_alive()
    assert sites[0].summary["masters"] == sites[1].summary["masters"]
    found = audit(open_store(uri), ["a", "b"], read_book(tmp_path / "book.jsonl"))
    assert found.honest_refused == [] and found.unbounded == []


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
