"""Masters as bytes: exact both ways, named by the hash of the values, and refused when they can't be a master."""

import hashlib
import struct
from collections.abc import Callable

import pytest
import torch
import zstandard
from torch import Tensor

from composer_prime.errors import CorruptObject
from composer_prime.outer.master_header import BLOCK, HEADER_BYTES, most_nbytes, read_header, table_bytes, write_header
from composer_prime.outer.masters import master_sha256, pack_master, plain_bytes, unpack_master


def values(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel + seed)) * 0.02


def from_bf16(numel: int) -> Tensor:
    return values(numel).bfloat16().float()


def constant(numel: int) -> Tensor:
    return torch.full((numel,), 1.0)


def edges(numel: int) -> Tensor:
    """Zeros of both signs, denormals, the largest and the smallest."""
    some = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4028234e38, -3.4028234e38, 1.1754944e-38])
    return some.repeat(numel // len(some) + 1)[:numel].contiguous()


SHAPES: list[Callable[[int], Tensor]] = [values, from_bf16, constant, edges]


def plain(weights: Tensor, momentum: Tensor | None) -> bytes:
    return b"".join(plain_bytes(weights, momentum))


@pytest.mark.parametrize("make", SHAPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 1003, BLOCK, BLOCK + 1])
def test_a_master_comes_back_bit_for_bit(make, numel):
    weights, momentum = make(numel), values(numel, seed=1)
    for held in (None, momentum):
        data = pack_master(weights, held)
        assert len(data) <= most_nbytes(numel, momentum=held is not None)
        back = unpack_master(data, numel, momentum=held is not None)
        assert plain(*back) == plain(weights, held)


def test_any_bytes_like_form_is_read():
    data = pack_master(values(1003), None)
    for form in (data, memoryview(data), bytearray(data)):
        assert torch.equal(unpack_master(form, 1003, momentum=False)[0], values(1003))


def test_the_plain_layout_is_weights_then_momentum_in_little_endian():
    data = plain(torch.tensor([1.0, -0.0]), torch.tensor([2.5, 1e-45]))
    assert data == struct.pack("<4f", 1.0, -0.0, 2.5, 1e-45)


def test_the_hash_is_that_of_the_plain_values_however_they_are_stored():
    weights, momentum = values(1003), values(1003, seed=1)
    assert master_sha256(weights, momentum) == hashlib.sha256(plain(weights, momentum)).hexdigest()
    assert master_sha256(weights, None) == hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    assert master_sha256(momentum, weights) != master_sha256(weights, momentum)
    assert master_sha256(torch.tensor([0.0]), torch.zeros(1)) != master_sha256(torch.tensor([-0.0]), torch.zeros(1))


def test_weights_that_came_from_bf16_take_a_third_and_noise_no_more_than_it_is():
    numel = 2**18
    assert len(pack_master(from_bf16(numel), None)) < 1.37 * numel
    assert len(pack_master(values(numel), None)) < 3.37 * numel
    assert len(pack_master(from_bf16(numel), torch.zeros(numel))) < 1.38 * numel


def test_the_same_values_make_the_same_bytes():
    assert pack_master(values(5000), None) == pack_master(values(5000).clone(), None)


def test_a_frame_of_another_level_is_read_as_well():
    """Another site's library may code the same values otherwise; both stand at one key, one after the other."""
    weights = constant(4096)
    data, other = pack_master(weights, None), bytearray()
    planes = [bytes(plain(weights, None)[place::4]) for place in range(4)]
    pieces = [zstandard.compress(plane, 19) for plane in planes]
    other += write_header(4096, HEADER_BYTES + 16 + sum(map(len, pieces)), momentum=False)
    other += struct.pack("<4I", *map(len, pieces)) + b"".join(pieces)
    assert bytes(other) != data
    assert torch.equal(unpack_master(other, 4096, momentum=False)[0], weights)


def test_an_unpacked_master_can_be_stepped_without_touching_the_bytes():
    data = bytearray(pack_master(values(5), values(5, seed=1)))
    before = bytes(data)
    weights, momentum = unpack_master(data, 5, momentum=True)
    assert momentum is not None
    weights.zero_()
    momentum.zero_()
    assert bytes(data) == before


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_master_with_momentum_is_refused_where_there_is_none_and_the_other_way_round():
    for data, has in ((pack_master(values(5), values(5)), False), (pack_master(values(5), None), True)):
        with pytest.raises(CorruptObject, match="a master of 5 parameters with"):
            unpack_master(data, 5, momentum=has)


def test_a_master_of_another_fragment_and_bytes_that_are_none_are_refused():
    with pytest.raises(CorruptObject, match="header says 6 parameters"):
        unpack_master(pack_master(values(6), None), 5, momentum=False)
    with pytest.raises(CorruptObject, match="marked b'PK"):
        unpack_master(b"PK\x03\x04" + bytes(60), 5, momentum=False)
    for size in (0, HEADER_BYTES - 1):
        with pytest.raises(CorruptObject, match=f"header of {HEADER_BYTES} bytes, this one has {size}"):
            unpack_master(bytes(size), 5, momentum=False)


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_master_that_is_cut_or_goes_on_is_refused(cut):
    data = pack_master(values(100), None)
    for wrong in (data[:-cut], data + bytes(cut)):
        with pytest.raises(CorruptObject, match=f"says {len(data)} bytes and has {len(wrong)}"):
            unpack_master(wrong, 100, momentum=False)


def test_a_header_that_states_more_than_the_fragment_can_have_is_refused():
    most = most_nbytes(100, momentum=False)
    assert read_header(write_header(100, most, momentum=False), 100, momentum=False) == most
    for stated in (most + 1, 2**60, HEADER_BYTES + table_bytes(100, momentum=False) - 1):
        with pytest.raises(CorruptObject, match=f"has at most {most} bytes, its header says {stated}"):
            read_header(write_header(100, stated, momentum=False), 100, momentum=False)


def forged(pieces: list[bytes], numel: int, sizes: list[int] | None = None) -> bytes:
    sizes = sizes or [len(piece) for piece in pieces]
    nbytes = HEADER_BYTES + 4 * len(sizes) + sum(map(len, pieces))
    return write_header(numel, nbytes, momentum=False) + struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(pieces)


def test_a_frame_that_unfolds_to_more_than_its_plane_is_refused_before_it_is_unfolded():
    numel, bomb = 4096, zstandard.compress(bytes(2**26))
    assert len(bomb) < numel
    with pytest.raises(CorruptObject, match=f"a plane of {numel} bytes was expected, its frame says {2**26}"):
        unpack_master(forged([bomb, *[bytes(numel)] * 3], numel), numel, momentum=False)


def test_a_frame_without_its_length_and_one_with_something_behind_it_are_refused():
    numel = 4096
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(numel))
    followed = zstandard.compress(bytes(numel)) + b"more"
    for piece in (unsized, followed, b"no frame"):
        with pytest.raises(CorruptObject, match="a plane of 4096 bytes"):
            unpack_master(forged([piece, *[bytes(numel)] * 3], numel), numel, momentum=False)


def test_a_table_of_sizes_that_does_not_fill_the_object_is_refused():
    pieces = [bytes(64)] * 4
    for sizes in ([64, 64, 64, 63], [64, 64, 64, 65], [2**32 - 1] * 4):
        with pytest.raises(CorruptObject, match="the planes of a stored master end at byte"):
            unpack_master(forged(pieces, 64, sizes), 64, momentum=False)


@pytest.mark.parametrize("place", range(0, 60, 3))
def test_a_flipped_bit_is_refused_or_gives_other_values(place):
    """What isn't refused here is refused by its hash."""
    weights = from_bf16(5000)
    data = bytearray(pack_master(weights, None))
    at = len(data) * place // 60
    data[at] ^= 1 << place % 8
    try:
        found, _ = unpack_master(data, 5000, momentum=False)
    except CorruptObject:
        return
    assert master_sha256(found, None) != master_sha256(weights, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("place", "name"), [(0, "weight 0"), (4, "weight 4"), (5, "momentum 0"), (9, "momentum 4")])
def test_values_that_are_not_finite_are_refused_by_place(value, place, name):
    both = torch.zeros(10)
    both[place] = value
    with pytest.raises(CorruptObject, match=f"{name} of a master is {value}"):
        unpack_master(pack_master(both[:5].clone(), both[5:].clone()), 5, momentum=True)
