"""What every registered codec must do; a new codec is covered as soon as it is registered and its bound stands here."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from composer_prime.errors import CorruptObject, SiteError
from composer_prime.outer.codecs import CODECS, Codec

SIZES = [0, 1, 255, 256, 257, 4 * 2**20 + 3]


def block_absmax(x: np.ndarray, block: int) -> np.ndarray:
    """For each value the largest magnitude of its block."""
    padded = np.zeros(-(-x.size // block) * block, dtype=np.float64)
    padded[: x.size] = np.abs(x)
    return np.repeat(padded.reshape(-1, block).max(1), block)[: x.size] if x.size else padded


BOUNDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp32": lambda x: np.zeros(x.size),
    "bf16": lambda x: np.abs(x) * 2.0**-8 + 2.0**-134,
    "int8": lambda x: block_absmax(x, 256) / 254 + 5e-41,
}
"""The largest absolute error of each value."""


@pytest.fixture(params=CODECS.values(), ids=list(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


def vector(numel: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed, as pseudo-gradients are, with zeros and magnitudes from 1e-12 to about 1e3."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(numel) * 10.0 ** rng.uniform(-12, 2, numel) * (rng.random(numel) > 0.05)
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("numel", SIZES)
def test_a_round_trip_stays_within_the_bound_and_the_size_is_exact(codec, numel):
    x = vector(numel)
    before = x.clone()
    payload = codec.encode(x)
    assert isinstance(payload, bytes) and len(payload) == codec.nbytes(numel)
    decoded = codec.decode(payload, numel)
    assert decoded.dtype == torch.float32 and decoded.shape == (numel,) and decoded.device.type == "cpu"
    error = np.abs(decoded.numpy().astype(np.float64) - x.numpy())
    assert (error <= BOUNDS[codec.name](x.numpy())).all()
    assert torch.equal(x, before)


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


@pytest.mark.parametrize("numel", [0, 1, 256, 257])
def test_a_payload_of_another_size_is_refused(codec, numel):
    size = codec.nbytes(numel)
    for wrong in {0, size - 1, size + 1, 2 * size, size + codec.nbytes(1)} - {size, -1}:
        with pytest.raises(
            CorruptObject, match=f"{numel} values in {codec.name} are {size} bytes, this payload has {wrong}"
        ):
            codec.decode(bytes(wrong), numel)


def test_hostile_bytes_are_refused_or_decode_to_finite_numbers(codec):
    rng, refused = np.random.default_rng(3), 0
    size = codec.nbytes(600)
    for _ in range(500):
        payload = bytearray(codec.encode(vector(600)))
        spoiled = rng.integers(0, size, rng.integers(1, 40))
        for place in spoiled:
            payload[place] = rng.choice(np.array([0x00, 0x7F, 0x80, 0xFF, rng.integers(256)]))
        try:
            assert torch.isfinite(codec.decode(payload, 600)).all()
        except CorruptObject as error:
            assert "refuse the offer" in str(error)
            refused += 1
    with pytest.raises(CorruptObject):
        codec.decode(b"\xff" * size, 600)
    assert refused > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 255, 256, 4 * 2**20 - 1, 4 * 2**20 + 2])
def test_values_that_are_not_finite_are_refused_by_index(codec, value, place):
    x = torch.zeros(4 * 2**20 + 3)
    x[place] = value
    with pytest.raises(SiteError, match=rf"value {place} of the pseudo-gradient is {value}, {codec.name} "):
        codec.encode(x)
