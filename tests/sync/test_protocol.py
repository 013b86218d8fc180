"""The decisions of the outer loop, one rule at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.sync.protocol import (
    GRACE_FLOOR_S,
    RoundDecision,
    RoundView,
    adaptive_grace,
    commit_rank,
    decide_round,
    due_fragment,
    garbage_limit,
    is_due,
    is_odd_one_out,
    num_parts,
    reducer_rank,
    run_is_over,
    takeover_s,
    training_is_over,
)
from tests.sync.harness import make_terms

TERMS = make_terms(quorum=2, grace_s=10.0)


def decide(verdicts, live, since_quorum_s=None, since_all_s=None, since_sound_s=None) -> RoundDecision:
    view = RoundView(verdicts, frozenset(live), since_quorum_s, since_all_s, since_sound_s)
    return decide_round(view, TERMS.quorum, TERMS.grace_s)


BOTH, FEW, EMPTY = {"a": "valid", "b": "valid"}, {"a": "valid"}, {"a": "empty", "b": "empty"}
BAD = {"a": "valid", "b": "invalid"}


@pytest.mark.parametrize(
    ("verdicts", "live", "since_s", "take"),
    [
        (BOTH, "ab", (0.0, 0.0), ("a", "b")),  # every live site has a valid offer: at once
        (BOTH, "a", (0.0, 0.0), ("a", "b")),  # also that of one that has died since
        (BOTH, "abc", (10.0,), ("a", "b")),  # c is silent, and grace is over
        (FEW, "a", (None, 1e9), None),  # never below the quorum while too few have offered
        (FEW, "ab", (), None),
        (BAD, "ab", (None, 9.0), None),  # of invalid offers nothing is merged, and only after grace
        (BAD, "ab", (None, 10.0), ()),
        (EMPTY, "ab", (None, 0.0), ()),  # nobody has anything: void at once
        (EMPTY, "abc", (None, None, 10.0), ()),  # who never offers holds that up for a grace, and no longer
        ({"a": "empty", "b": "invalid"}, "abc", (), None),  # no quorum of sound offers
        ({"a": "valid", "b": "valid", "c": "guest"}, "abc", (0.0,) * 3, ("a", "b", "c")),  # a guest's is merged too
        ({"a": "valid", "b": "guest", "c": "guest"}, "abc", (0.0,) * 3, None),  # one member, two must
        ({"a": "valid", "b": "guest"}, "ab", (99.0,) * 3, ()),  # void, after grace: everyone has offered
        ({"a": "valid", "b": "guest"}, "abc", (99.0,) * 3, ()),  # c can't hold it open for ever
        ({"a": "empty", "b": "empty", "c": "guest"}, "abc", (0.0,) * 3, None),  # c has something to merge
        ({"a": "guest", "b": "guest"}, "ab", (99.0,) * 3, ()),
    ],
)
def test_a_round_closes_on_what_the_quorum_offers_or_void_once_it_has_waited(verdicts, live, since_s, take):
    decision = decide(verdicts, live, *since_s)
    assert (decision.take if decision.close else None) == take


@pytest.mark.parametrize(("verdicts", "since_s"), [(BOTH, (4.0,)), (EMPTY, (None, None, 4.0))])
def test_a_round_that_waits_for_a_live_site_says_for_how_long(verdicts, since_s):
    decision = decide(verdicts, "abc", *since_s)
    assert not decision.close and decision.wait_s == 6.0


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


@settings(max_examples=300, derandomize=True)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["valid", "empty", "invalid"])),
    st.frozensets(st.sampled_from("abcdef")),
    st.one_of(st.none(), st.floats(0, 20)),
    st.one_of(st.none(), st.floats(0, 20)),
)
def test_a_decision_takes_only_valid_offers_and_never_fewer_than_the_quorum(
    verdicts, live, since_quorum_s, since_all_s
):
    decision = decide(verdicts, live, since_quorum_s, since_all_s)
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


@pytest.mark.parametrize(("step", "due"), [(1, False), (2, True), (3, False), (4, True)])
def test_by_steps_a_fragment_is_steps_per_turn_h_over_p(step, due):
    assert is_due(step, make_terms(inner_steps=4, fragments=2)) is due


def test_grace_is_as_long_as_rounds_take_within_the_runs_limit():
    terms = make_terms(grace_s=30.0)
    assert adaptive_grace([], terms) == 30.0
    assert adaptive_grace([12.0, 11.0, 300.0], terms) == 12.0
    assert adaptive_grace([0.01] * 3, terms) == GRACE_FLOOR_S
    assert adaptive_grace([1e3] * 3, terms) == 30.0
    assert takeover_s(20.0) == 5.0 and takeover_s(0.1) == GRACE_FLOOR_S
    assert adaptive_grace([100.0] * 9 + [2.0] * 8, terms) == 2.0, "old rounds count for nothing"


def test_a_round_is_cut_into_parts_only_when_many_offer_and_the_codec_can_be_cut():
    terms = make_terms(gather_sites=4)
    assert [num_parts(taken, 128, terms) for taken in (0, 1, 4, 5, 32, 200)] == [0, 0, 0, 5, 32, 128]
    assert num_parts(32, 1, terms) == 0


SITES = [f"s{number}" for number in range(7)]
ANYONE = frozenset[str]()


def test_parts_are_dealt_evenly_and_anew_each_round():
    dealt = set()
    for version in range(20):
        first = [[s for s in SITES if reducer_rank(s, SITES, SITES, 0, version, p, ANYONE) == 0] for p in range(7)]
        assert sorted(names[0] for names in first) == SITES and all(len(names) == 1 for names in first)
        dealt.add(first[0][0])
    assert len(dealt) > 3


def test_a_part_whose_reducer_is_gone_is_the_next_ones_at_once():
    (first,) = [s for s in SITES if reducer_rank(s, SITES, SITES, 0, 0, 3, ANYONE) == 0]
    left = [s for s in SITES if s != first]
    assert {reducer_rank(s, left, SITES, 0, 0, 3, ANYONE) for s in left} == set(range(6))


def test_guests_merge_no_part_and_the_others_have_theirs_dealt_evenly():
    hosts, guests = SITES[:3], frozenset(SITES[3:])
    for version in range(20):
        first = [[s for s in SITES if reducer_rank(s, SITES, SITES, 0, version, p, guests) == 0] for p in range(3)]
        assert sorted(names[0] for names in first) == hosts and all(len(names) == 1 for names in first)
    ranks = {s: reducer_rank(s, SITES, SITES, 0, 0, 0, guests) for s in SITES}
    assert {ranks[s] for s in hosts} == {0, 1, 2} and {ranks[s] for s in SITES[3:]} == {None}


def test_a_round_of_guests_offers_alone_is_merged_by_a_host():
    guests = frozenset(SITES[1:])
    ranks = {s: reducer_rank(s, SITES, SITES[1:], 0, 0, 3, guests) for s in SITES}
    assert ranks == {s: 0 if s == "s0" else None for s in SITES}


def test_the_odd_one_out_is_the_site_that_no_others_agree_with():
    assert is_odd_one_out("x", ["y"]) and is_odd_one_out("x", ["y", "y", "x"])
    assert not any(is_odd_one_out("x", theirs) for theirs in ([], ["x"], ["x", "y"], ["x", "x", "y", "z"]))


@pytest.mark.parametrize(
    ("snapshots", "pins", "limit"),
    [
        ((), (), 0),
        ((8,), (9,), 0),
        ((0, 4, 8), (9, 8), 4),
        ((0, 4, 8), (3, 9), 3),
        ((0, 4, 8), (0,), 0),
        ((4, 8), (), 4),
    ],
)
def test_garbage_is_what_lies_below_the_second_newest_snapshot_and_every_pin(snapshots, pins, limit):
    assert garbage_limit(snapshots, pins) == limit
