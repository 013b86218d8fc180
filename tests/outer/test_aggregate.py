"""Aggregates: bits of separately rounded fp32, never of a fused multiply-add; what an adversary can move is bounded."""

import numpy as np
import pytest
import torch

from composer_prime.outer import chunks
from composer_prime.outer.aggregate import add_guests, weighted_mean
from composer_prime.outer.shares import Weighed, shares
from tests.outer.reference import fma, numpy_with_guests, random_fp32, same_bits


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


def test_inputs_stay_and_the_result_is_new_memory():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    total = weighted_mean([(1.0, x)])
    assert torch.equal(total, x) and total.data_ptr() != x.data_ptr()
    total.zero_()
    assert torch.equal(x, before)


def random_parts(seed: int, num_sites: int, numel: int) -> list[tuple[float, np.ndarray]]:
    rng = np.random.default_rng(seed)
    factors = rng.random(num_sites).astype(np.float32)
    parts = [(float(factor), random_fp32(rng, numel)) for factor in factors]
    for _, x in parts:
        x[: numel // 3] = np.round(x[: numel // 3].clip(-2, 2))  # ties, and zeros of both signs
    return parts


def tensors(parts: list[tuple[float, np.ndarray]]) -> list[tuple[float, torch.Tensor]]:
    return [(multiplier, torch.from_numpy(x)) for multiplier, x in parts]


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


def attacked(attack: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Seven honest sites, and three adversaries who know what honest sites send."""
    rng = np.random.default_rng(8)
    truth = rng.standard_normal(5003)
    honest = [(truth + 0.3 * rng.standard_normal(5003)).astype(np.float32) for _ in range(7)]
    adversary = {"scaled": 1000 * honest[0], "flipped": -honest[0]}[attack]
    return honest, [adversary] * 3


@pytest.mark.parametrize("attack", ["scaled", "flipped"])
@pytest.mark.parametrize("weighting", ["tokens", "equal"])
def test_adversaries_move_a_clipped_mean_by_at_most_their_share_of_clip_times_the_median_norm(attack, weighting):
    honest, adversaries = attacked(attack)
    sites = {f"s{place}": x for place, x in enumerate(adversaries + honest)}
    norms = {site: float(np.linalg.norm(x.astype(np.float64))) for site, x in sites.items()}
    offers = {site: Weighed(tokens=100, steps=1, norm=norm) for site, norm in norms.items()}
    factors = shares(offers, weighting=weighting, aggregate="clipped", clip=1.5)
    everyone = weighted_mean(tensors([(factors[site], x) for site, x in sites.items()]))
    innocent = [(factors[site], x if int(site[1:]) >= 3 else np.zeros_like(x)) for site, x in sites.items()]
    moved = np.linalg.norm((everyone - weighted_mean(tensors(innocent))).double().numpy())
    assert 0 < moved <= 0.3 * 1.5 * sorted(norms.values())[4] * (1 + 1e-5)
