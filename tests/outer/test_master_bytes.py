"""Masters as bytes: exact both ways, named by their hash, and refused when the bytes can't be a master."""

import hashlib
import struct

import pytest
import torch

from composer_prime.errors import CorruptObject
from composer_prime.outer.masters import master_sha256, pack_master, unpack_master


def master(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)


@pytest.mark.parametrize("numel", [0, 1, 1003])
def test_a_master_without_momentum_is_its_weights(numel):
    weights, _ = master(numel)
    data = pack_master(weights, None)
    assert data == weights.numpy().astype("<f4").tobytes()
    assert master_sha256(weights, None) == hashlib.sha256(data).hexdigest()
    back, momentum = unpack_master(data, numel, momentum=False)
    assert torch.equal(back, weights) and momentum is None


def test_a_master_with_momentum_is_refused_where_there_is_none_and_the_other_way_round():
    weights, momentum = master(5)
    for data, has in ((pack_master(weights, momentum), False), (pack_master(weights, None), True)):
        with pytest.raises(CorruptObject, match="a master of 5 parameters has"):
            unpack_master(data, 5, momentum=has)


@pytest.mark.parametrize("numel", [0, 1, 1003])
def test_a_master_comes_back_bit_for_bit(numel):
    weights, momentum = master(numel)
    data = pack_master(weights, momentum)
    assert len(data) == 8 * numel
    for form in (data, memoryview(data), bytearray(data)):
        back = unpack_master(form, numel, momentum=True)
        assert torch.equal(back[0], weights) and back[1] is not None and torch.equal(back[1], momentum)


def test_the_layout_is_weights_then_momentum_in_little_endian():
    data = pack_master(torch.tensor([1.0, -0.0]), torch.tensor([2.5, 1e-45]))
    assert data == struct.pack("<4f", 1.0, -0.0, 2.5, 1e-45)


def test_the_hash_is_that_of_the_bytes():
    weights, momentum = master(1003)
    assert master_sha256(weights, momentum) == hashlib.sha256(pack_master(weights, momentum)).hexdigest()
    assert master_sha256(momentum, weights) != master_sha256(weights, momentum)
    assert master_sha256(torch.tensor([0.0]), torch.zeros(1)) != master_sha256(torch.tensor([-0.0]), torch.zeros(1))


def test_an_unpacked_master_can_be_stepped_without_touching_the_bytes():
    data = bytearray(pack_master(*master(5)))
    before = bytes(data)
    weights, momentum = unpack_master(data, 5, momentum=True)
    assert momentum is not None
    weights.zero_()
    momentum.zero_()
    assert bytes(data) == before


@pytest.mark.parametrize("size", [0, 39, 41, 80])
def test_another_size_is_refused(size):
    with pytest.raises(CorruptObject, match=f"5 parameters has 40 bytes, this one has {size}"):
        unpack_master(bytes(size), 5, momentum=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("place", "name"), [(0, "weight 0"), (4, "weight 4"), (5, "momentum 0"), (9, "momentum 4")])
def test_values_that_are_not_finite_are_refused_by_place(value, place, name):
    data = bytearray(40)
    struct.pack_into("<f", data, 4 * place, value)
    with pytest.raises(CorruptObject, match=f"{name} of a master is {value}"):
        unpack_master(bytes(data), 5, momentum=True)
