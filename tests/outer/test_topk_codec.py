"""What is particular to top-k: what is kept, its magnitudes, its size, its one form, and what its decoder refuses."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch

from composer_prime.errors import CorruptObject
from composer_prime.outer.codecs import get_codec, rice

TOPK = get_codec("topk")


def heavy(numel: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(2, numel).astype(np.float32)


def kept_places(x: np.ndarray) -> list[int]:
    """Places of the largest of each block by a stable sort: of equal ones the first, and only those that aren't 0."""
    places = []
    for start in range(0, len(x), 4096):
        block = np.abs(x[start : start + 4096])
        order = np.argsort(-block, kind="stable")[: -(-64 * len(block) // 4096)]
        places += sorted(start + int(place) for place in order if block[place] > 0)
    return places


def tied(numel: int) -> np.ndarray:
    """Whole numbers from -3 to 3, so that hundreds of a block are equal."""
    return np.random.default_rng(1).integers(-3, 4, numel).astype(np.float32)


def sparse(numel: int) -> np.ndarray:
    """Two thirds of the blocks have under 64 nonzero values, some none."""
    x = heavy(numel, seed=2)
    x[np.arange(numel) % 97 > 0] = 0
    x[: 4096 * 3] = 0
    x[5] = -1
    return x


@pytest.mark.parametrize("draw", [heavy, tied, sparse])
@pytest.mark.parametrize("numel", [4096, 50_000, 300_001, 63, 65])
def test_the_largest_of_each_block_are_kept_with_their_signs(draw, numel):
    x = draw(numel)
    decoded = TOPK.decode(TOPK.encode(torch.from_numpy(x)), numel).numpy()
    places = kept_places(x)
    assert np.flatnonzero(decoded).tolist() == places
    assert (np.sign(decoded[places]) == np.sign(x[places])).all()


def test_a_block_has_at_most_two_magnitudes_near_the_best_ones():
    x = heavy(4096 * 20)
    decoded = TOPK.decode(TOPK.encode(torch.from_numpy(x)), x.size).numpy()
    for start in range(0, x.size, 4096):
        block, coded = np.abs(x[start : start + 4096]).astype(np.float64), np.abs(decoded[start : start + 4096])
        places = np.flatnonzero(coded)
        assert len(set(coded[places])) <= 2
        largest = np.sort(block[places])[::-1]
        best = min(
            ((largest[:cut] - largest[:cut].mean()) ** 2).sum() + ((largest[cut:] - largest[cut:].mean()) ** 2).sum()
            for cut in range(1, 64)
        )
        rounding = ((coded[places] * 2.0**-5) ** 2).sum()
        assert ((block[places] - coded[places]) ** 2).sum() <= best + rounding
        assert (np.abs(block - coded) <= block.max() * (1 + 2.0**-5)).all()


def test_too_few_nonzero_values_take_one_magnitude_and_zeros_stay():
    x = torch.zeros(8192)
    x[4100], x[5000], x[8191] = -3.0, 1.0, 2.0
    decoded = TOPK.decode(TOPK.encode(x), 8192)
    assert torch.nonzero(decoded).flatten().tolist() == [4100, 5000, 8191]
    assert decoded[[4100, 5000, 8191]].tolist() == [-2.0, 2.0, 2.0]


@pytest.mark.parametrize("ratio", [1.0, 1.0625, 3.0, 2.0**40, 2.0**200])
@pytest.mark.parametrize("num_high", [0, 1, 31, 63])
def test_two_magnitudes_that_have_codes_come_back_exactly(ratio, num_high):
    x = torch.zeros(4096)
    x[::64] = 2.0**-100
    x[: 64 * num_high : 64] = -(2.0**-100) * ratio
    assert torch.equal(TOPK.decode(TOPK.encode(x), 4096), x)


def test_values_under_the_least_magnitude_count_as_zeros():
    x = torch.full((4096,), 2.0**-131)
    assert not TOPK.decode(TOPK.encode(x), 4096).any()
    x[100:140] = 2.0**-130
    assert torch.nonzero(TOPK.decode(TOPK.encode(x), 4096)).flatten().tolist() == list(range(100, 140))
    largest = torch.full((64,), 3.4028e38)
    assert torch.isfinite(TOPK.decode(TOPK.encode(largest), 64)).all()


@pytest.mark.parametrize("draw", ["gaussian", "student", "lognormal"])
def test_payloads_are_205_times_smaller_than_fp32(draw):
    rng, numel = np.random.default_rng(5), 2**21
    normal = rng.standard_normal(numel)
    scale = {
        "gaussian": np.ones(numel),
        "student": rng.standard_exponential(numel) ** -0.5,
        "lognormal": np.exp(2 * rng.standard_normal(numel)),
    }
    payload = TOPK.encode(torch.from_numpy((normal * scale[draw]).astype(np.float32)))
    assert 4 * numel / len(payload) >= 205
    assert abs(len(payload) / TOPK.nbytes(numel) - 1) < 0.005


def test_size_bounds_are_reached_by_the_first_and_the_last_positions():
    numel = 4096 * 5 + 1000
    for rows, bound in ((slice(None, 64), 0), (slice(-64, None), 1)):
        x = torch.zeros(5, 4096)
        x[:, rows] = 1
        short = torch.zeros(1000)
        short[:16] = 1 if bound == 0 else 0
        short[-16:] = 0 if bound == 0 else 1
        payload = TOPK.encode(torch.cat([x.flatten(), short]))
        assert len(payload) == TOPK.size_bounds(numel)[bound]


def test_blocks_are_coded_apart():
    x = torch.from_numpy(heavy(4096 * 3 + 500))
    whole = TOPK.decode(TOPK.encode(x), x.numel())
    apart = [TOPK.decode(TOPK.encode(part.clone()), part.numel()) for part in x.split(4096)]
    assert torch.equal(torch.cat(apart), whole)


@pytest.mark.parametrize("draw", [heavy, tied, sparse])
def test_each_decoded_vector_has_one_payload(draw):
    """Bits flipped in every byte: what is accepted is what its values are coded as."""
    x = torch.from_numpy(draw(4096 + 700))
    payload, accepted = TOPK.encode(x), 0
    assert TOPK.encode(TOPK.decode(payload, x.numel())) == payload
    for place in range(len(payload)):
        for bit in range(8):
            flipped = bytearray(payload)
            flipped[place] ^= 1 << bit
            try:
                decoded = TOPK.decode(bytes(flipped), x.numel())
            except CorruptObject:
                continue
            accepted += 1
            assert TOPK.encode(decoded) == flipped
    assert accepted > 0


def payload_of(levels: tuple[int, int], values: list[int], positions: list[int]) -> bytes:
    """A payload of one block written from the documented layout."""
    gaps = np.diff(np.array(positions), prepend=-1) - 1
    head = (levels[0] | levels[1] << 12).to_bytes(3, "little")
    return head + rice.pack(np.array(values), 2) + rice.pack(gaps % 32, 5) + rice.pack_unary(gaps >> 5)


ONE, TWO, TOP = 0x7F0, 0x800, 0xFEF
SPREAD = list(range(0, 4096, 64))
FIRST = list(range(64))


def test_the_layout_is_the_documented_one():
    x = torch.zeros(4096)
    x[::64], x[64] = 1.0, -2.0
    values = [3 if place == 1 else 0 for place in range(64)]
    assert TOPK.encode(x) == payload_of((ONE, TWO), values, SPREAD)
    assert TOPK.encode(torch.zeros(4096)) == payload_of((0, 0), [0] * 64, FIRST)


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (payload_of((TWO, ONE), [0, 2] * 32, SPREAD), "magnitudes .* must rise"),
        (payload_of((ONE, TOP + 1), [0, 2] * 32, SPREAD), "magnitudes .* at most 4079"),
        (payload_of((ONE, ONE), [0, 2] * 32, SPREAD), "must use one magnitude if both are equal"),
        (payload_of((ONE, TWO), [0] * 64, SPREAD), "must use one magnitude if both are equal, else both"),
        (payload_of((ONE, TWO), [2] * 64, SPREAD), "must use one magnitude if both are equal, else both"),
        (payload_of((0, ONE), [1] + [2] * 63, FIRST), "has zeros with a sign"),
        (payload_of((0, ONE), [2] * 63 + [0], SPREAD), "must fill up with the first zeros"),
        (payload_of((0, 0), [0] * 64, SPREAD), "must fill up with the first zeros"),
        (payload_of((ONE, ONE), [0] * 64, [*SPREAD[:-1], 4096]), "has positions behind its end"),
        (payload_of((ONE, ONE), [0] * 63, SPREAD[:-1]), "they must hold 64 in all of them|bits behind"),
        (payload_of((ONE, ONE), [0] * 64, SPREAD)[:-1] + b"\x00", "hold 6. gaps"),
        (payload_of((ONE, ONE), [0] * 64, SPREAD) + b"\x00", "they must hold 64 in all of them"),
        (payload_of((ONE, ONE), [0] * 64, SPREAD) + b"\x01", "hold 65 gaps"),
    ],
)
def test_what_no_encoder_writes_is_refused(payload, fault):
    with pytest.raises(CorruptObject, match=fault):
        TOPK.decode(payload, 4096)


def test_a_gap_without_an_end_is_refused():
    least, most = TOPK.size_bounds(4096)
    start = payload_of((ONE, ONE), [0] * 64, FIRST)[: least - 8]
    with pytest.raises(CorruptObject, match="hold 0 gaps in 0 bytes"):
        TOPK.decode(start + bytes(most - len(start)), 4096)


def test_bits_behind_the_last_number_are_refused():
    numbers = np.array([1, 2, 3])
    packed = np.frombuffer(rice.pack(numbers, 5), np.uint8)
    assert rice.unpack(packed, 3, 5).tolist() == [1, 2, 3]
    spoiled = packed.copy()
    spoiled[-1] |= 0x80
    with pytest.raises(CorruptObject, match="bits behind 3 numbers of 5 bits must be 0"):
        rice.unpack(spoiled, 3, 5)


@pytest.mark.parametrize("width", range(1, 9))
def test_numbers_of_every_width_come_back(width):
    numbers = np.random.default_rng(width).integers(0, 2**width, 1003)
    for count in (0, 1, 7, 8, 9, 1003):
        packed = rice.pack(numbers[:count], width)
        assert len(packed) == -(-count * width // 8)
        assert int.from_bytes(packed, "little") == sum(int(n) << width * i for i, n in enumerate(numbers[:count]))
        assert rice.unpack(np.frombuffer(packed, np.uint8), count, width).tolist() == numbers[:count].tolist()


def test_expected_bits_are_the_mean_over_all_choices(monkeypatch):
    monkeypatch.setattr(rice, "STEP", 3)
    choices = list(combinations(range(11), 3))
    bits = [sum(1 + gap // 3 for gap in np.diff(choice, prepend=-1) - 1) for choice in choices]
    assert rice.expected_unary_bits(11, 3) == Fraction(int(sum(bits)), len(choices))
    assert rice.unary_bounds(11, 3) == (min(bits), max(bits))
    rice.expected_unary_bits.cache_clear()
