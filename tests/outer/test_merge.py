"""Adopting a master: own movement is kept whole by carry and settle, and mixed by blend."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.outer.merge import SPAN_ELEMENTS, carry, carrying, changed, settle, settling

EPS = 2.0**-23
VECTORS = st.integers(0, 2**32 - 1).map(
    lambda seed: [
        torch.randn(64, generator=torch.Generator().manual_seed(seed + place)) * 10.0 ** (place - 2)
        for place in range(4)
    ]
)


def close(left: torch.Tensor, right: torch.Tensor, *terms: torch.Tensor) -> bool:
    """Equal but for a few roundings of the largest term."""
    largest = torch.stack([term.abs() for term in terms]).amax(0)
    return bool(((left - right).abs() <= 4 * EPS * largest).all())


@given(VECTORS)
def test_carry_moves_by_what_the_master_moved_and_keeps_own_movement(vectors):
    local, old_base, new_base, _ = vectors
    moved = carry(local, old_base, new_base)
    assert close(moved - new_base, local - old_base, local, old_base, new_base)
    assert close(moved - local, new_base - old_base, local, old_base, new_base)


@given(VECTORS)
def test_carry_to_the_same_master_changes_nothing(vectors):
    local, base, *_ = vectors
    assert torch.equal(carry(local, base, base), local)


@given(VECTORS)
def test_carry_over_two_masters_is_carry_to_the_last(vectors):
    local, first, second, third = vectors
    assert close(carry(carry(local, first, second), second, third), carry(local, first, third), *vectors)


@given(VECTORS)
def test_settle_without_movement_since_the_capture_is_the_master_exactly(vectors):
    captured, new_base, *_ = vectors
    assert torch.equal(settle(captured.clone(), captured, new_base), new_base)


@given(VECTORS)
def test_settle_keeps_exactly_what_came_after_the_capture(vectors):
    captured, after, new_base, _ = vectors
    local = captured + after
    assert torch.equal(settle(local, captured, new_base), new_base + (local - captured))


@given(VECTORS)
def test_settle_counts_the_offer_once_and_carry_keeps_it_for_later(vectors):
    """Alone with outer lr 1 and no momentum: the master takes the offer, and nobody's weights are moved by that."""
    base, moved, after, _ = vectors
    captured = base + moved
    local = captured + after
    new_base = base - (base - captured)
    assert close(settle(local, captured, new_base), local, base, captured, local)
    not_taken = carry(local, base, base)
    assert torch.equal(not_taken - base, local - base)


@given(VECTORS)
def test_inputs_are_left_alone(vectors):
    copies = [vector.clone() for vector in vectors]
    first, second, third, _ = vectors
    results = [carry(first, second, third), settle(first, second, third)]
    for result in results:
        result.zero_()
    assert all(torch.equal(vector, copy) for vector, copy in zip(vectors, copies, strict=True))


@pytest.mark.parametrize("numel", [1, SPAN_ELEMENTS, 2 * SPAN_ELEMENTS + 3])
def test_a_change_made_span_by_span_where_values_lie_is_the_whole_one(numel):
    generator = torch.Generator().manual_seed(numel)
    local, one, other = (torch.randn(numel + 5, generator=generator) for _ in range(3))
    for change, whole in (
        (carrying(one, other), carry(local, one, other)),
        (settling(one, other), settle(local, one, other)),
    ):
        values = local.clone()
        changed(values[:5], change)  # two parameters of one fragment
        changed(values[5:], change, start=5)
        assert torch.equal(values, whole)
