"""What every registered codec must do; a new codec is covered as soon as it is registered and its bound stands here."""

import hashlib
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch

from composer_prime.errors import CorruptObject, SiteError
from composer_prime.outer.codecs import CODECS, Codec
from composer_prime.outer.codecs.base import SLICE

SIZES = [0, 1, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 2**17 + 31, 4 * 2**20 + 3]


def block_absmax(x: np.ndarray, block: int) -> np.ndarray:
    """For each value the largest magnitude of its block."""
    padded = np.zeros(-(-x.size // block) * block, dtype=np.float64)
    padded[: x.size] = np.abs(x)
    return np.repeat(padded.reshape(-1, block).max(1), block)[: x.size] if x.size else padded


BOUNDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp32": lambda x: np.zeros(x.size),
    "bf16": lambda x: np.abs(x) * 2.0**-8 + 2.0**-134,
    "int8": lambda x: block_absmax(x, 256) / 254 + 5e-41,
    "int4": lambda x: block_absmax(x, 64) / 14 * (1 + 1e-6) + 6.5e-40,
    "topk": lambda x: block_absmax(x, 4096) * (1 + 2.0**-5) + 2.0**-130,
}
"""The largest absolute error of each value."""

GOLDEN = {
    "fp32": "fbea1a9080161f93",
    "bf16": "c0c1ce9d1ba49959",
    "int8": "098dd53f6b7edd28",
    "int4": "2306ed330821c3f6",
    "topk": "cdaf703f973ad346",
}
"""codec -> the first 16 digits of `golden_digest`; a machine or a torch that codes otherwise would fork the masters."""


@pytest.fixture(params=CODECS.values(), ids=list(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


def vector(numel: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed, as pseudo-gradients are, with zeros and magnitudes from 1e-12 to about 1e3."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(numel) * 10.0 ** rng.uniform(-12, 2, numel) * (rng.random(numel) > 0.05)
    return torch.from_numpy(x.astype(np.float32))


def golden_vector(numel: int = 20_011) -> torch.Tensor:
    """The same bits everywhere: made of integers; 16 exponents, scattered zeros, a block with three other values."""
    state = (np.arange(numel, dtype=np.uint64) * 2654435761 + 12345) % 2**32
    whole = (state >> 8).astype(np.int64) - 2**23
    x = np.ldexp(whole.astype(np.float32), -(state & 15).astype(np.int32) - 30)
    x[state % 11 == 0] = 0
    x[8192 : 8192 + 4096 - 3] = 0
    return torch.from_numpy(x)


@pytest.mark.parametrize("numel", SIZES)
def test_a_round_trip_stays_within_the_bound_and_the_size_within_its_own(codec, numel):
    x = vector(numel)
    before = x.clone()
    payload = codec.encode(x)
    least, most = codec.size_bounds(numel)
    assert isinstance(payload, bytes) and least <= len(payload) <= most
    assert least <= codec.nbytes(numel) <= most
    decoded = codec.decode(payload, numel)
    assert decoded.dtype == torch.float32 and decoded.shape == (numel,) and decoded.device.type == "cpu"
    error = np.abs(decoded.numpy().astype(np.float64) - x.numpy())
    assert (error <= BOUNDS[codec.name](x.numpy())).all()
    assert torch.equal(x, before)


@pytest.mark.parametrize("numel", [SLICE, 10 * SLICE + 1, 100 * SLICE - 1])
def test_the_typical_size_is_near_and_exact_where_the_size_is_fixed(codec, numel):
    least, most = codec.size_bounds(numel)
    assert least == most or not codec.sliceable
    for x in (vector(numel), torch.randn(numel, generator=torch.Generator().manual_seed(0))):
        size = len(codec.encode(x))
        assert abs(size - codec.nbytes(numel)) <= (0 if least == most else 0.05 * size)


@pytest.mark.parametrize("numel", [0, SLICE, 3 * SLICE, 7 * SLICE + 1000])
@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec.sliceable], ids=lambda codec: codec.name)
def test_slices_coded_apart_decode_as_the_whole(codec, numel):
    x = vector(numel)
    whole = codec.decode(codec.encode(x), numel)
    for step in (SLICE, 2 * SLICE):
        parts = [part.clone() for part in x.split(step)]
        apart = [codec.decode(codec.encode(part), part.numel()) for part in parts]
        assert torch.equal(torch.cat(apart), whole)


def test_only_a_codec_that_is_lossy_changes_values(codec):
    x = vector(10_000)
    assert codec.lossy != torch.equal(codec.decode(codec.encode(x), 10_000), x)


@pytest.mark.parametrize("numel", SIZES)
def test_what_was_decoded_codes_to_the_same_values_again(codec, numel):
    once = codec.decode(codec.encode(vector(numel)), numel)
    payload = codec.encode(once)
    assert torch.equal(codec.decode(payload, numel), once)
    assert codec.encode(codec.decode(payload, numel)) == payload


def test_tiny_and_huge_values_stay_within_the_bound_or_are_refused(codec):
    for magnitude in (1e-45, 1e-44, 1.9e-43, 1e-40, 1e-38, 1e38, 3.4028e38):
        x = vector(1000, seed=1).sign() * magnitude
        try:
            decoded = codec.decode(codec.encode(x), 1000)
        except SiteError:
            assert magnitude > 3e38
            continue
        error = np.abs(decoded.numpy().astype(np.float64) - x.numpy())
        assert (error <= BOUNDS[codec.name](x.numpy())).all(), magnitude
        assert torch.equal(codec.decode(codec.encode(decoded), 1000), decoded)


def test_zeros_stay_zeros(codec):
    assert not codec.decode(codec.encode(torch.zeros(1000)), 1000).any()
    x = vector(20_000)
    x[4096:12_288] = 0
    x[4100] = 1
    decoded = codec.decode(codec.encode(x), 20_000)
    assert not decoded[x == 0].any()
    assert decoded[4100] == 1 or (decoded[4100] - 1).abs() < 0.01


def test_threads_change_no_byte(codec):
    x, threads, results = vector(1_000_003), torch.get_num_threads(), set()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            payload = codec.encode(x)
            results.add((payload, codec.decode(payload, x.numel()).numpy().tobytes()))
    finally:
        torch.set_num_threads(threads)
    assert len(results) == 1


def digests() -> dict[str, str]:
    """codec -> hash of a payload and of what it decodes to."""
    x = vector(300_001, seed=7)
    found = {}
    for name, codec in CODECS.items():
        payload = codec.encode(x)
        found[name] = hashlib.sha256(payload + codec.decode(payload, x.numel()).numpy().tobytes()).hexdigest()
    return found


def golden_digest(codec: Codec) -> str:
    """Hash of the payload of `golden_vector` and of what it decodes to."""
    x = golden_vector()
    payload = codec.encode(x)
    decoded = codec.decode(payload, x.numel()).numpy().astype("<f4")
    return hashlib.sha256(payload + decoded.tobytes()).hexdigest()[:16]


def test_the_bytes_are_those_of_every_other_machine(codec):
    assert golden_digest(codec) == GOLDEN[codec.name]


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_processes_and_vector_instructions_change_no_byte(capability):
    code = "from tests.contracts.test_codec_contract import digests; print(digests())"
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": capability,
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.stdout.strip() == str(digests()), run.stderr


def test_bytes_of_any_kind_are_read_and_not_kept(codec):
    x = vector(1000)
    payload = bytearray(codec.encode(x))
    expected = codec.decode(bytes(payload), 1000)
    from_view = codec.decode(memoryview(payload), 1000)
    payload[:] = bytes(len(payload))
    assert torch.equal(from_view, expected)
    from_view.add_(1)  # the caller may change what it got


@pytest.mark.parametrize("numel", [0, 1, 256, 257, 5000])
def test_a_payload_of_another_size_is_refused(codec, numel):
    least, most = codec.size_bounds(numel)
    sizes = f"{least}" if least == most else f"{least} to {most}"
    for wrong in {0, least - 1, most + 1, 2 * most, most + codec.nbytes(1)} - {-1}:
        if not least <= wrong <= most:
            with pytest.raises(
                CorruptObject, match=f"{numel} values in {codec.name} are {sizes} bytes, this payload has {wrong}:"
            ):
                codec.decode(bytes(wrong), numel)


def spoiled(codec: Codec, numel: int, rng: np.random.Generator) -> Iterator[bytes]:
    """A payload with some bytes replaced, with one bit flipped, cut, extended, and random bytes of a size in bounds."""
    payload = codec.encode(vector(numel, seed=int(rng.integers(2**32))))
    replaced = bytearray(payload)
    for place in rng.integers(0, len(payload), rng.integers(1, 40)):
        replaced[place] = rng.choice(np.array([0x00, 0x7F, 0x80, 0xFF, rng.integers(256)]))
    yield bytes(replaced)
    flipped = bytearray(payload)
    flipped[rng.integers(len(payload))] ^= 1 << rng.integers(8)
    yield bytes(flipped)
    yield payload[: -int(rng.integers(1, len(payload)))]
    yield payload + rng.bytes(int(rng.integers(1, 9)))
    yield payload + bytes(1)
    yield rng.bytes(int(rng.integers(*codec.size_bounds(numel), endpoint=True)))


@pytest.mark.parametrize("numel", [1, 600, 9001])
def test_hostile_bytes_are_refused_or_decode_to_finite_numbers(codec, numel):
    rng, refused = np.random.default_rng(3), 0
    for _ in range(100):
        for payload in spoiled(codec, numel, rng):
            try:
                decoded = codec.decode(payload, numel)
            except CorruptObject as error:
                assert "refuse the offer" in str(error)
                refused += 1
                continue
            assert decoded.dtype == torch.float32 and decoded.shape == (numel,)
            assert torch.isfinite(decoded).all()
            assert len(payload) in range(codec.size_bounds(numel)[0], codec.size_bounds(numel)[1] + 1)
    for size in codec.size_bounds(numel):
        with pytest.raises(CorruptObject):
            codec.decode(b"\xff" * size, numel)
    assert refused > 0


def test_memory_for_hostile_bytes_is_proportional_to_the_values(codec):
    numel, rng = 200_000, np.random.default_rng(4)
    sizes = codec.size_bounds(numel)
    payloads = [fill * size for size in sizes for fill in (b"\x00", b"\x01", b"\xff")] + [bytes(100 * numel)]
    payloads += list(spoiled(codec, numel, rng))
    tracemalloc.start()
    try:
        for payload in payloads:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with suppress(CorruptObject):
                codec.decode(payload, numel)
            assert tracemalloc.get_traced_memory()[1] - before < 12 * numel
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 255, 256, 4 * 2**20 - 1, 4 * 2**20 + 2])
def test_values_that_are_not_finite_are_refused_by_index(codec, value, place):
    x = torch.zeros(4 * 2**20 + 3)
    x[place] = value
    with pytest.raises(SiteError, match=rf"value {place} of the pseudo-gradient is {value}, {codec.name} "):
        codec.encode(x)
