"""The upper half of a stored master is near the whole, and with the lower half it is the whole, bit for bit."""

import pytest
import torch
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.halves import LOWER, UPPER, Fetch, half_nbytes, lower_half, stretches, upper_half
from composer_prime.outer.master_header import BLOCK
from composer_prime.outer.masters import head_nbytes, pack_master, plane_ends

SIZES = [1, 7, 1003, BLOCK, BLOCK + 1, 2 * BLOCK + 5]


def trained(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel + seed)) * 0.02


def fetching(data: bytes) -> Fetch:
    return lambda start, length: data[start : start + length]


def ends_of(data: bytes, numel: int, *, momentum: bool) -> list[int]:
    return plane_ends(data[: head_nbytes(numel, momentum=momentum)], numel, momentum=momentum)


@pytest.mark.parametrize("numel", SIZES)
def test_the_two_halves_make_the_master_bit_for_bit(numel):
    for vectors in ([trained(numel)], [trained(numel), trained(numel, seed=1)]):
        momentum = len(vectors) > 1
        data = pack_master(vectors[0], vectors[1] if momentum else None)
        ends = ends_of(data, numel, momentum=momentum)
        upper = upper_half(fetching(data), ends, numel, momentum=momentum)
        kept = [each.clone() for each in upper]
        whole = lower_half(fetching(data), ends, upper)
        assert whole is not None
        assert all(torch.equal(a, b) for a, b in zip(whole, vectors, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(upper, kept, strict=True)), "the upper half is still in use"


@pytest.mark.parametrize("numel", SIZES)
def test_the_upper_half_is_off_by_one_bf16_step_at_most_and_right_on_the_mean(numel):
    weights = trained(numel)
    data = pack_master(weights, None)
    (upper,) = upper_half(fetching(data), ends_of(data, numel, momentum=False), numel, momentum=False)
    off = (upper - weights) / weights.abs()
    assert off.abs().max() <= 2.0**-8
    if numel >= BLOCK:
        assert off.mean().abs() < 1e-5
        truncated = (weights.view(torch.int32) & ~0xFFFF).view(torch.float32)
        assert ((truncated - weights) / weights).mean().abs() > 1e-3, "cut off, all would be too small"


@pytest.mark.parametrize("numel", [1003, 2 * BLOCK + 5])
def test_each_half_reads_its_own_bytes_and_together_they_are_the_master(numel):
    data = pack_master(trained(numel), trained(numel, seed=1))
    ends = ends_of(data, numel, momentum=True)
    nbytes = {half: half_nbytes(ends, numel, momentum=True, half=half) for half in (UPPER, LOWER)}
    assert sum(nbytes.values()) + head_nbytes(numel, momentum=True) == len(data)
    for half in (UPPER, LOWER):
        assert sum(each.nbytes for each in stretches(ends, numel, momentum=True, half=half)) == nbytes[half]
    if numel > BLOCK:
        assert nbytes[UPPER] < 1.4 * 2 * numel < 2 * 2 * numel <= nbytes[LOWER]


def test_a_fetch_of_the_lower_half_stops_when_it_is_told_to():
    numel = 3 * BLOCK
    data = pack_master(trained(numel), None)
    ends, fetched = ends_of(data, numel, momentum=False), []

    def fetch(start: int, length: int) -> bytes:
        fetched.append(start)
        return data[start : start + length]

    upper = upper_half(fetch, ends, numel, momentum=False)
    fetched.clear()
    assert lower_half(fetch, ends, upper, goes_on=lambda: len(fetched) < 2) is None
    assert len(fetched) == 2


def test_a_truncated_master_and_planes_that_are_none_are_refused():
    numel = 5000
    data = pack_master(trained(numel).bfloat16().float(), None)
    ends = ends_of(data, numel, momentum=False)
    with pytest.raises(CorruptObject, match=r"of \d+ bytes from"):
        upper_half(fetching(data[:-1]), ends, numel, momentum=False)
    spoilt = data[: ends[3]] + bytes(ends[4] - ends[3])
    with pytest.raises(CorruptObject, match=r"can't be decompressed|its frame says"):
        upper_half(fetching(spoilt), ends, numel, momentum=False)


@pytest.mark.parametrize("cut", [-1, 5])
def test_a_head_that_does_not_fit_is_refused(cut):
    numel = 5000
    data = pack_master(trained(numel), None)
    head = head_nbytes(numel, momentum=False)
    with pytest.raises(CorruptObject, match="table of a stored master ends at byte"):
        plane_ends(data[: head - 1], numel, momentum=False)
    other = bytes([data[head - 4] ^ (cut & 0xFF)])  # the size of the last plane
    with pytest.raises(CorruptObject, match="planes of a stored master end at byte"):
        plane_ends(data[: head - 4] + other + data[head - 3 : head], numel, momentum=False)
