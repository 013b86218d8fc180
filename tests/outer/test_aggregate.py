"""Aggregates: bits of separately rounded fp32, never of a fused multiply-add, in any order and for any adversary."""

import itertools
import math

import numpy as np
import pytest
import torch

from composer_prime.outer import aggregate as aggregate_module
from composer_prime.outer import chunks
from composer_prime.outer.aggregate import add_guests, aggregate, comparators, weighted_mean
from composer_prime.outer.shares import Weighed, shares
from tests.outer.reference import fma, numpy_aggregate, numpy_with_guests, random_fp32, same_bits


def test_bits_equal_numpy_over_every_kind_of_float():
    rng = np.random.default_rng(0)
    vectors = [random_fp32(rng, 2_000_003) for _ in range(3)]
    shares = [float(np.float32(share)) for share in (0.2, 0.3, 0.5)]
    expected = np.float32(shares[0]) * vectors[0]
    for share, vector in zip(shares[1:], vectors[1:], strict=True):
        expected = expected + np.float32(share) * vector
    total = weighted_mean([(s, torch.from_numpy(v)) for s, v in zip(shares, vectors, strict=True)])
    assert same_bits(total.numpy(), expected)


@pytest.mark.parametrize("numel", [1, 7, 1003, chunks.CHUNK_ELEMENTS + 5])
def test_a_case_that_a_fused_multiply_add_gets_wrong_comes_out_right(numel):
    a = 1 + 2.0**-12  # a * a = 1 + 2**-11 + 2**-24; the last bit falls off when the product is rounded
    c = -(1 + 2.0**-11)
    assert fma(a, a, c) == 2.0**-24
    total = weighted_mean([(1.0, torch.full((numel,), c)), (a, torch.full((numel,), a))])
    assert torch.equal(total, torch.zeros(numel))


def test_fused_and_separate_differ_on_ordinary_numbers_and_ours_is_the_separate_one():
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(2_000).astype(np.float32) for _ in range(2))
    share = float(np.float32(1 / 3))
    total = weighted_mean([(share, torch.from_numpy(x)), (share, torch.from_numpy(y))]).numpy()
    first = np.float32(share) * x
    fused = np.array([fma(share, float(v), float(c)) for v, c in zip(y, first, strict=True)], dtype=np.float32)
    assert same_bits(total, first + np.float32(share) * y)
    assert (fused != total).sum() > 100


def test_inputs_stay_and_the_result_is_new_memory():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    total = weighted_mean([(1.0, x)])
    assert torch.equal(total, x) and total.data_ptr() != x.data_ptr()
    total.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("parts", [[], [(1.0, torch.zeros(1)), (1.0, torch.zeros(2))]])
def test_nothing_and_unequal_lengths_are_refused(parts):
    with pytest.raises(ValueError, match="vectors of one length"):
        weighted_mean(parts)


def random_parts(seed: int, num_sites: int, numel: int) -> list[tuple[float, np.ndarray]]:
    rng = np.random.default_rng(seed)
    factors = rng.random(num_sites).astype(np.float32)
    parts = [(float(factor), random_fp32(rng, numel)) for factor in factors]
    for _, x in parts:
        x[: numel // 3] = np.round(x[: numel // 3].clip(-2, 2))  # ties, and zeros of both signs
    return parts


def tensors(parts: list[tuple[float, np.ndarray]]) -> list[tuple[float, torch.Tensor]]:
    return [(multiplier, torch.from_numpy(x)) for multiplier, x in parts]


@pytest.mark.parametrize("num_sites", [*range(1, 9), 13, 32])
@pytest.mark.parametrize(("rule", "trim"), [("median", 0.0), ("trimmed", 0.0), ("trimmed", 0.3), ("trimmed", 0.5)])
def test_robust_rules_have_the_bits_of_numpys_sort_over_every_kind_of_float(rule, trim, num_sites):
    parts = random_parts(num_sites, num_sites, 20_011)
    result = aggregate(rule, tensors(parts), trim=trim)
    assert same_bits(result.numpy(), numpy_aggregate(rule, parts, trim))


@pytest.mark.parametrize("rule", ["mean", "clipped"])
def test_mean_and_clipped_are_the_weighted_mean(rule):
    parts = tensors(random_parts(2, 3, 1003))
    assert same_bits(aggregate(rule, parts, trim=0.4).numpy(), weighted_mean(parts).numpy())


@pytest.mark.parametrize("num_guests", [1, 2, 5])
@pytest.mark.parametrize("share", [0.01, 1 / 3, 0.5])
def test_guests_have_the_bits_of_their_definition_over_every_kind_of_float(num_guests, share):
    (_, members), *guests = random_parts(num_guests, 1 + num_guests, 20_011)
    result = torch.from_numpy(members.copy())
    add_guests(result, tensors(guests), share)
    assert same_bits(result.numpy(), numpy_with_guests(members, guests, share))


@pytest.mark.parametrize("share", [1 / 3, 0.5])
def test_whatever_guests_offer_each_value_goes_the_members_way_and_at_most_so_much_farther(share):
    rng = np.random.default_rng(1)
    members = rng.standard_normal(5003).astype(np.float32)
    for guest in (-2 * members, 1e30 * members, rng.standard_normal(5003).astype(np.float32), np.zeros_like(members)):
        result = torch.from_numpy(members.copy())
        add_guests(result, tensors([(1.0, guest.astype(np.float32)), (0.5, -members)]), share)
        stretch = result.numpy().astype(np.float64) / members
        assert stretch.min() >= 1 and stretch.max() <= (1 + share / (1 - share)) * (1 + 1e-6)


def test_a_guest_that_goes_the_members_way_is_added_whole():
    members = np.linspace(-1, 1, 101, dtype=np.float32)
    result = torch.from_numpy(members.copy())
    add_guests(result, tensors([(0.25, members)]), 1 / 3)
    assert same_bits(result.numpy(), members + np.float32(0.25) * members + np.float32(0))


@pytest.mark.parametrize("num_rows", range(1, 13))
def test_comparators_sort_every_pattern_of_zeros_and_ones_hence_everything(num_rows):
    rows = np.array(list(itertools.product((0, 1), repeat=num_rows))).T
    for low, high in comparators(num_rows):
        assert low < high
        rows[[low, high]] = np.minimum(rows[low], rows[high]), np.maximum(rows[low], rows[high])
    assert (np.diff(rows, axis=0) >= 0).all()


@pytest.mark.parametrize("rule", ["trimmed", "median"])
def test_the_order_of_sites_changes_no_bit_of_a_robust_rule(rule):
    parts = random_parts(3, 6, 5003)
    expected = aggregate(rule, tensors(parts), trim=0.2)
    for order in (list(reversed(range(6))), [2, 0, 5, 1, 4, 3]):
        result = aggregate(rule, tensors([parts[place] for place in order]), trim=0.2)
        assert same_bits(result.numpy(), expected.numpy())


@pytest.mark.parametrize("rule", ["trimmed", "median"])
def test_threads_and_span_length_change_no_bit_of_a_robust_rule(rule, monkeypatch):
    parts = tensors(random_parts(4, 5, 200_003))
    threads, results = torch.get_num_threads(), set()
    try:
        for num_threads, elements in [(1, 1 << 16), (2, 1 << 16), (2, 1 << 20), (1, 999)]:
            torch.set_num_threads(num_threads)
            monkeypatch.setattr(aggregate_module, "SORT_ELEMENTS", elements)
            results.add(aggregate(rule, parts, trim=0.2).numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(results) == 1


@pytest.mark.parametrize("rule", ["trimmed", "median"])
def test_one_site_alone_gets_its_own_values(rule):
    ((_, x),) = random_parts(5, 1, 4001)
    assert np.array_equal(aggregate(rule, tensors([(1.0, x)]), trim=0.4).numpy(), x)


def test_the_median_of_sites_that_agree_is_what_they_say():
    ((_, x),) = random_parts(6, 1, 4001)
    x = np.where(np.abs(x) < 1e-37, np.float32(0), x)  # halving a denormal rounds
    for num_sites in (2, 3, 4, 7):
        assert np.array_equal(aggregate("median", tensors([(1.0, x)] * num_sites), trim=0.0).numpy(), x)


def test_the_median_of_the_largest_finite_values_does_not_overflow():
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    assert torch.equal(aggregate("median", [(1.0, largest)] * 4, trim=0.0), largest)


@pytest.mark.parametrize("num_sites", [2, 3, 7, 10])
def test_trimming_nobody_is_the_mean_of_equal_shares_to_a_few_places(num_sites):
    rng = np.random.default_rng(num_sites)
    vectors = [rng.standard_normal(10_007).astype(np.float32) for _ in range(num_sites)]
    trimmed = aggregate("trimmed", tensors([(1.0, x) for x in vectors]), trim=0.0).numpy()
    equal = weighted_mean(tensors([(float(np.float32(1 / num_sites)), x) for x in vectors])).numpy()
    # Each way makes num_sites + 1 roundings of at most half an ulp of the largest partial sum.
    bound = (num_sites + 1) * np.finfo(np.float32).eps * np.abs(vectors).sum(axis=0) / num_sites
    assert (np.abs(trimmed - equal) <= bound).all()


@pytest.mark.parametrize(("num_sites", "trim"), [(3, 0.34), (5, 0.49), (1, 0.5), (5, 0.5)])
def test_trimming_an_odd_number_of_sites_by_half_leaves_the_median(num_sites, trim):
    parts = tensors(random_parts(7, num_sites, 1009))
    assert torch.equal(aggregate("trimmed", parts, trim=trim), aggregate("median", parts, trim=0.0))


def attacked(attack: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Seven honest sites, and three adversaries who know what honest sites send."""
    rng = np.random.default_rng(8)
    truth = rng.standard_normal(5003)
    honest = [(truth + 0.3 * rng.standard_normal(5003)).astype(np.float32) for _ in range(7)]
    adversary = {
        "scaled": 1000 * honest[0],
        "flipped": -honest[0],
        "huge": np.where(truth < 0, -3e38, 3e38).astype(np.float32),
        "silent": np.zeros(5003, np.float32),
    }[attack]
    return honest, [adversary] * 3


@pytest.mark.parametrize("attack", ["scaled", "flipped", "huge", "silent"])
@pytest.mark.parametrize("rule", ["trimmed", "median"])
def test_three_adversaries_of_ten_leave_every_coordinate_between_honest_ones(rule, attack):
    honest, adversaries = attacked(attack)
    result = aggregate(rule, tensors([(1.0, x) for x in adversaries + honest]), trim=0.3).numpy()
    rounding = 1e-6 * np.abs(honest).max(axis=0)
    assert (result >= np.min(honest, axis=0) - rounding).all()
    assert (result <= np.max(honest, axis=0) + rounding).all()


@pytest.mark.parametrize("attack", ["scaled", "flipped"])
@pytest.mark.parametrize("weighting", ["tokens", "equal"])
def test_adversaries_move_a_clipped_mean_by_at_most_their_share_of_clip_times_the_median_norm(attack, weighting):
    honest, adversaries = attacked(attack)
    sites = {f"s{place}": x for place, x in enumerate(adversaries + honest)}
    norms = {site: float(np.linalg.norm(x.astype(np.float64))) for site, x in sites.items()}
    offers = {site: Weighed(tokens=100, steps=1, norm=norm) for site, norm in norms.items()}
    factors = shares(offers, weighting=weighting, aggregate="clipped", clip=1.5)
    everyone = aggregate("clipped", tensors([(factors[site], x) for site, x in sites.items()]), trim=0.0)
    innocent = [(factors[site], x if int(site[1:]) >= 3 else np.zeros_like(x)) for site, x in sites.items()]
    moved = np.linalg.norm((everyone - aggregate("clipped", tensors(innocent), trim=0.0)).double().numpy())
    assert 0 < moved <= 0.3 * 1.5 * sorted(norms.values())[4] * (1 + 1e-5)


@pytest.mark.parametrize("rule", ["trimmed", "median"])
def test_a_robust_rule_leaves_its_inputs_and_returns_new_memory(rule):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    aggregate(rule, [(1.0, x), (0.5, x)], trim=0.0).zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("rule", ["mean", "clipped", "trimmed", "median"])
@pytest.mark.parametrize("parts", [[], [(1.0, torch.zeros(1)), (1.0, torch.zeros(2))]])
def test_every_rule_refuses_nothing_and_unequal_lengths(rule, parts):
    with pytest.raises(ValueError, match="vectors of one length"):
        aggregate(rule, parts, trim=0.0)


def test_another_rule_and_a_trim_beyond_half_are_refused():
    parts = [(1.0, torch.zeros(1))]
    with pytest.raises(ValueError, match='mean, clipped, trimmed, median, got "mode"'):
        aggregate("mode", parts, trim=0.0)  # pyright: ignore[reportArgumentType]
    for trim in (-0.1, 0.51, math.nan):
        with pytest.raises(ValueError, match=r"0 <= trim <= 0\.5"):
            aggregate("trimmed", parts, trim=trim)
