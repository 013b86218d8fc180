"""Multipliers: exact fp32 shares, and clipping that neither inflated nor deflated norms of a minority can turn."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.outer.shares import GuestLimits, Weighed, shares

counts = st.integers(0, 10**12)
norms = st.floats(0, 1e30)
offers_of_any_kind = st.dictionaries(st.sampled_from("abcdefgh"), st.builds(Weighed, counts, counts, norms), min_size=1)


def with_norms(*values: float) -> dict[str, Weighed]:
    return {chr(ord("a") + place): Weighed(tokens=10, steps=1, norm=norm) for place, norm in enumerate(values)}


@given(st.dictionaries(st.sampled_from("abcdefgh"), counts, min_size=1), st.sampled_from(["tokens", "equal"]))
def test_multipliers_are_fp32_sorted_and_sum_to_one(tokens, weighting):
    offers = {site: Weighed(count, 0, 0.0) for site, count in tokens.items()}
    found = shares(offers, weighting=weighting, aggregate="mean", clip=1.0)
    assert list(found) == sorted(tokens)
    assert all(float(np.float32(share)) == share for share in found.values())
    assert sum(found.values()) == pytest.approx(1, abs=1e-6)
    if weighting == "tokens" and any(tokens.values()):
        assert found == pytest.approx({s: n / sum(tokens.values()) for s, n in tokens.items()}, rel=1e-7)
    else:
        assert set(found.values()) == {float(np.float32(1 / len(tokens)))}


@given(offers_of_any_kind, st.sampled_from(["tokens", "steps"]), st.sampled_from(["mean", "clipped"]))
def test_shares_follow_tokens_or_steps_times_the_clip_factor_rounded_to_fp32_once(offers, weighting, aggregate):
    found = shares(offers, weighting=weighting, aggregate=aggregate, clip=1.5)
    total = sum(getattr(offer, weighting) for offer in offers.values())
    middle = sorted(offer.norm for offer in offers.values())[(len(offers) - 1) // 2]
    assert list(found) == sorted(offers)
    for site, offer in offers.items():
        fraction = Fraction(getattr(offer, weighting), total) if total else Fraction(1, len(offers))
        clipped = aggregate == "clipped" and offer.norm > 1.5 * middle
        factor = 1.5 * middle / offer.norm if clipped else 1.0
        assert found[site] == float(np.float32(float(fraction) * factor))


@given(offers_of_any_kind, st.sampled_from(["tokens", "steps", "equal"]))
def test_the_mean_ignores_norms_and_clip(offers, weighting):
    unclipped = {site: Weighed(offer.tokens, offer.steps, 0.0) for site, offer in offers.items()}
    expected = shares(unclipped, weighting=weighting, aggregate="mean", clip=1.0)
    assert shares(offers, weighting=weighting, aggregate="mean", clip=0.0) == expected


@given(offers_of_any_kind, st.randoms(use_true_random=False))
def test_the_order_of_offers_changes_nothing(offers, random):
    mixed = list(offers.items())
    random.shuffle(mixed)
    for aggregate in ("mean", "clipped"):
        found = [shares(o, weighting="tokens", aggregate=aggregate, clip=1.1) for o in (offers, dict(mixed))]
        assert list(found[0].items()) == list(found[1].items())


def test_norms_within_the_limit_are_left_alone_and_one_of_ten_times_the_median_is_cut_to_it():
    found = shares(with_norms(1.0, 2.0, 20.0), weighting="equal", aggregate="clipped", clip=3.0)
    assert found == {site: float(np.float32(factor / 3)) for site, factor in {"a": 1.0, "b": 1.0, "c": 0.3}.items()}


def test_of_two_norms_the_lower_one_sets_the_limit():
    assert shares(with_norms(8.0, 1.0), weighting="equal", aggregate="clipped", clip=2.0) == {"a": 0.125, "b": 0.5}


@pytest.mark.parametrize("lie", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize(("num_honest", "num_adversaries"), [(7, 3), (6, 4), (6, 5), (51, 49)])
def test_a_minority_of_adversaries_keeps_the_limit_between_honest_norms(lie, num_honest, num_adversaries):
    honest = {f"h{place}": 1.0 + place / num_honest for place in range(num_honest)}
    claimed = honest | {f"x{place}": lie for place in range(num_adversaries)}
    offers = {site: Weighed(1, 1, norm) for site, norm in claimed.items()}
    found = shares(offers, weighting="equal", aggregate="clipped", clip=1.0)
    after = {site: found[site] * len(offers) * norm for site, norm in claimed.items()}
    assert max(after.values()) <= max(honest.values()) * (1 + 1e-6)
    assert min(after[site] for site in honest) >= min(honest.values()) * (1 - 1e-6)


@pytest.mark.parametrize(("num_honest", "num_adversaries"), [(1, 1), (5, 5)])
def test_half_of_the_sites_cannot_inflate_the_limit(num_honest, num_adversaries):
    found = shares(
        with_norms(*[1.0] * num_honest, *[1e30] * num_adversaries), weighting="equal", aggregate="clipped", clip=2
    )
    count = num_honest + num_adversaries
    cut = float(np.float32(2e-30 / count))
    assert list(found.values()) == [float(np.float32(1 / count))] * num_honest + [cut] * num_adversaries


def test_norms_of_zero_count_and_are_not_clipped_themselves():
    third = float(np.float32(1 / 3))
    assert list(shares(with_norms(0, 0, 3), weighting="equal", aggregate="clipped", clip=2).values()) == [
        third,
        third,
        0,
    ]
    assert list(shares(with_norms(0, 0), weighting="equal", aggregate="clipped", clip=2).values()) == [0.5, 0.5]


def test_counts_beyond_any_float_still_give_exact_shares():
    offers = {"a": Weighed(10**400, 1, 1.0), "b": Weighed(3 * 10**400, 1, 1.0)}
    assert shares(offers, weighting="tokens", aggregate="mean", clip=1.0) == {"a": 0.25, "b": 0.75}


offers_of_near_norms = st.dictionaries(
    st.sampled_from("abcdefgh"), st.builds(Weighed, counts, counts, st.floats(1e-3, 1e3) | st.just(0.0)), min_size=1
)
guest_names = st.frozensets(st.sampled_from("abcdefgh"))
rules = st.sampled_from(["mean", "clipped"])
LIMITS = GuestLimits("g", share=1 / 3, clip=1.0)


@given(offers_of_near_norms, guest_names, st.sampled_from(["tokens", "steps", "equal"]), rules)
def test_guests_have_a_third_of_the_weight_at_most_and_none_more_than_the_members_median_norm(
    offers, guests, weighting, aggregate
):
    found = shares(offers, weighting=weighting, aggregate=aggregate, clip=2.0, guests=GuestLimits(guests, 1 / 3, 1.0))
    own = sorted(offer.norm for site, offer in offers.items() if site not in guests)
    if not own:
        assert set(found.values()) == {0.0}
        return
    median = own[(len(own) - 1) // 2]
    # What a guest's offer would weigh if it were no longer than the median, and so what its factor leaves of it.
    short = {site: Weighed(offer.tokens, offer.steps, 0.0) for site, offer in offers.items()}
    weights = shares(short, weighting=weighting, aggregate=aggregate, clip=2.0, guests=GuestLimits(guests, 1 / 3, 1.0))
    theirs = sum(weight for site, weight in weights.items() if site in guests)
    members = sum(weight for site, weight in weights.items() if site not in guests)
    assert theirs <= (1 / 3) * (theirs + members) * (1 + 1e-6)
    if theirs:
        assert theirs + members == pytest.approx(1.0)
    for site in guests & offers.keys():
        assert found[site] * offers[site].norm <= weights[site] * median * (1 + 1e-6)


@given(offers_of_any_kind, st.sampled_from(["tokens", "steps", "equal"]), rules)
def test_guests_that_are_not_in_the_round_change_nothing(offers, weighting, aggregate):
    absent = GuestLimits("xyz", share=0.1, clip=0.1)
    found = shares(offers, weighting=weighting, aggregate=aggregate, clip=2.0, guests=absent)
    assert found == shares(offers, weighting=weighting, aggregate=aggregate, clip=2.0)


@pytest.mark.parametrize("aggregate", ["mean", "clipped"])
@pytest.mark.parametrize("claimed", [2**53, 1])
def test_one_guest_that_pushes_twice_as_hard_the_other_way_does_not_turn_the_step_around(aggregate, claimed):
    offers = {"a": Weighed(10, 1, 1.0), "g": Weighed(claimed, 1, 2.0)}  # g is a's movement, -2 times
    found = shares(offers, weighting="tokens", aggregate=aggregate, clip=2.0, guests=LIMITS)
    assert found["a"] * 1.0 - found["g"] * 2.0 >= (found["a"] + found["g"] * 2.0) / 3 * (1 - 1e-6) > 0


def test_a_guest_neither_deflates_nor_inflates_the_members_limit():
    for norm in (1e-30, 1e30):
        offers = {"a": Weighed(10, 1, 1.0), "b": Weighed(10, 1, 1.5), "g": Weighed(10, 1, norm)}
        found = shares(offers, weighting="equal", aggregate="clipped", clip=2.0, guests=LIMITS)
        assert (found["a"], found["b"]) == (float(np.float32(1 / 3)),) * 2


@pytest.mark.parametrize("aggregate", ["mean", "clipped"])
def test_a_void_round_has_no_shares(aggregate):
    assert shares({}, weighting="tokens", aggregate=aggregate, clip=1.0) == {}
