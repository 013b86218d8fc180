"""The decisions of the outer loop, one rule at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.sync.protocol import (
    RoundView,
    commit_fault,
    commit_rank,
    decide_round,
    due_fragment,
    offer_fault,
    run_is_over,
    training_is_over,
    write_commit,
)
from composer_prime.sync.records import Commit, Offer
from tests.sync.harness import make_terms

TERMS = make_terms(quorum=2, grace_s=10.0)
PAYLOAD = "rounds/0000/00000003/payload/{site}-0123456789abcdef"


def view(verdicts, live, since_quorum_s=None, since_all_s=None):
    return RoundView(verdicts, frozenset(live), since_quorum_s, since_all_s)


def offer(site="a", **changes):
    values = {
        "site": site,
        "incarnation": 0,
        "fragment": 0,
        "version": 3,
        "base_sha": "b" * 64,
        "tokens": 10,
        "steps": 2,
        "trained_tokens": 40,
        "codec": "fp32",
        "payload": PAYLOAD.format(site=site),
        "sha256": "c" * 64,
        "nbytes": 8,
        "norm": 1.0,
    }
    return Offer(**(values | changes))


def commit(take=("a", "b"), tokens=(10, 30), **changes):
    offers = {site: offer(site, tokens=count) for site, count in zip(take, tokens, strict=True)}
    record = write_commit(
        fragment=0,
        version=3,
        base_sha="b" * 64,
        previous="d" * 64,
        offers=offers,
        take=take,
        refused={},
        terms=TERMS,
        committer="a",
        incarnation=0,
    )
    return record.model_copy(update=changes), offers


def judge(record: Commit, offers, *, version=3, previous="d" * 64, taken=()):
    return commit_fault(
        record, fragment=0, version=version, previous=previous, offers=offers, taken=set(taken), terms=TERMS
    )


@pytest.mark.parametrize(
    ("versions", "due"), [((0, 0, 0), 0), ((1, 0, 0), 1), ((1, 1, 0), 2), ((5, 4, 4), 1), ((2, 3, 2), 0)]
)
def test_fragment_due_is_the_lowest_version_then_the_lowest_index(versions, due):
    assert due_fragment(versions) == due


def test_training_ends_before_the_closing_round_and_the_run_after_it():
    terms = make_terms(rounds=3)
    assert not training_is_over((3, 2), terms)
    assert training_is_over((3, 3), terms) and not run_is_over((4, 3), terms)
    assert run_is_over((4, 4), terms)


def test_round_closes_at_once_when_every_live_site_has_a_valid_offer():
    assert decide_round(view({"a": "valid", "b": "valid"}, "ab", 0.0, 0.0), TERMS).take == ("a", "b")


def test_an_offer_of_a_site_that_has_died_since_is_still_taken():
    assert decide_round(view({"a": "valid", "b": "valid"}, "a", 0.0, 0.0), TERMS).take == ("a", "b")


def test_round_waits_for_a_live_site_until_grace_is_over():
    verdicts = {"a": "valid", "b": "valid"}
    waiting = decide_round(view(verdicts, "abc", 4.0), TERMS)
    assert not waiting.close and waiting.wait_s == 6.0
    assert decide_round(view(verdicts, "abc", 10.0), TERMS).take == ("a", "b")


def test_round_never_closes_below_quorum_while_too_few_have_offered():
    assert not decide_round(view({"a": "valid"}, "a", None, 1e9), TERMS).close
    assert not decide_round(view({"a": "valid"}, "ab", None, None), TERMS).close


def test_round_of_invalid_offers_merges_nothing_but_only_after_grace():
    verdicts = {"a": "valid", "b": "invalid"}
    assert not decide_round(view(verdicts, "ab", None, 9.0), TERMS).close
    decision = decide_round(view(verdicts, "ab", None, 10.0), TERMS)
    assert decision.close and decision.take == ()


def test_round_in_which_nobody_has_anything_closes_void_at_once():
    decision = decide_round(view({"a": "empty", "b": "empty"}, "ab", None, 0.0), TERMS)
    assert decision.close and decision.take == ()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["valid", "empty", "invalid"])),
    st.frozensets(st.sampled_from("abcdef")),
    st.one_of(st.none(), st.floats(0, 20)),
    st.one_of(st.none(), st.floats(0, 20)),
)
def test_a_decision_takes_only_valid_offers_and_never_fewer_than_the_quorum(
    verdicts, live, since_quorum_s, since_all_s
):
    decision = decide_round(RoundView(verdicts, live, since_quorum_s, since_all_s), TERMS)
    assert all(verdicts[site] == "valid" for site in decision.take)
    assert decision.take == () or len(decision.take) >= TERMS.quorum
    assert decision.close or decision.take == ()


def test_commit_order_is_a_permutation_and_changes_from_round_to_round():
    live = [f"site-{n}" for n in range(8)]
    firsts = set()
    for version in range(40):
        ranks = {site: commit_rank(site, live, 0, version) for site in live}
        assert sorted(ranks.values()) == list(range(8))
        firsts.add(min(ranks, key=ranks.__getitem__))
    assert len(firsts) > 4


def test_a_commit_written_by_the_rules_has_no_fault():
    assert judge(*commit()) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": 4}, "its key"),
        ({"previous": "e" * 64}, "commit before"),
        ({"taken": "swapped"}, "sorted"),
        ({"taken": "short"}, "quorum"),
        ({"taken": "heavy"}, "weighs"),
        ({"taken": "other payload"}, "another payload"),
        ({"taken": "stranger"}, "isn't there"),
    ],
)
def test_a_commit_that_does_not_follow_from_manifest_and_offers_is_refused(changes, word):
    record, offers = commit()
    first, second = record.taken
    bad = {
        "swapped": (second, first),
        "short": (first.model_copy(update={"multiplier": 1.0}),),
        "heavy": (first.model_copy(update={"multiplier": 0.5}), second),
        "other payload": (first.model_copy(update={"sha256": "f" * 64}), second),
        "stranger": (first, second, second.model_copy(update={"site": "z"})),
    }
    if "taken" in changes:
        changes = {"taken": bad[changes["taken"]]}
    assert word in (judge(record.model_copy(update=changes), offers) or "")


def test_a_payload_is_taken_at_most_once_in_a_run():
    record, offers = commit()
    assert "earlier round" in (judge(record, offers, taken=[PAYLOAD.format(site="a")]) or "")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"site": "z"}, "record says"),
        ({"version": 2}, "record says"),
        ({"base_sha": "0" * 64}, "stands on"),
        ({"codec": "int8"}, "coded as"),
        ({"nbytes": 9}, "bytes"),
        ({"tokens": 0}, "no tokens"),
        ({"payload": PAYLOAD.format(site="b")}, "belongs to"),
        ({"payload": "rounds/0000/00000009/payload/a-0123456789abcdef"}, "at most"),
        ({"payload": "somewhere/else"}, "does not name"),
    ],
)
def test_an_offer_that_cannot_stand_in_the_round_is_refused_with_the_reason(changes, word):
    terms = {
        "site": "a",
        "fragment": 0,
        "version": 3,
        "base_sha": "b" * 64,
        "nbytes": 8,
        "taken": set(),
        "terms": TERMS,
    }
    assert offer_fault(offer(), **terms) is None
    assert word in (offer_fault(offer(**changes), **terms) or "")


def test_a_late_payload_may_stand_in_a_later_round_until_it_is_too_old():
    late = offer(version=3, payload="rounds/0000/00000000/payload/a-0123456789abcdef")
    terms = {"site": "a", "fragment": 0, "base_sha": "b" * 64, "nbytes": 8, "taken": set(), "terms": TERMS}
    assert offer_fault(late, version=3, **terms) is None
    too_old = late.model_copy(update={"version": 5})
    assert "at most 4 rounds" in (offer_fault(too_old, version=5, **terms) or "")
