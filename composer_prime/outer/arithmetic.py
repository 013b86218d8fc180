"""One hash that tells whether this machine computes masters as all others do.

The manifest holds it; a site that gets another one stops before it offers anything. The inputs are made to betray
fused multiply-adds, flushed denormals, another rounding of ties and other vector tails.
"""

import hashlib

import torch

from composer_prime.outer.aggregate import weighted_mean
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.masters import plain_bytes
from composer_prime.outer.outer_optimizer import nesterov_step
from composer_prime.outer.shares import Weighed, shares

NUM_VALUES = 65_536 + 259
"""Long enough that torch splits the work between threads, and no multiple of a block or a vector register."""

LR, MU, NUM_ROUNDS = 0.7, 0.9, 3


def test_vector() -> str:
    """sha256 (hex) of masters and payloads after three rounds of three sites on fixed inputs; about 20 ms.

    The same on every machine whose arithmetic may take part, for any number of threads. Denormals are part of it, so
    call it on the thread that does the outer loop's work (flushing to zero is set per thread).
    """
    digest = hashlib.sha256()
    weights, momentum = _values(seed=1), torch.zeros(NUM_VALUES)
    for round_number in range(NUM_ROUNDS):
        offers = {site: Weighed(tokens, 0, 0.0) for site, tokens in (("a", 3), ("b", 5), ("c", 11 + round_number))}
        factors = shares(offers, weighting="tokens", aggregate="mean", clip=1.0)
        parts = []
        for place, (codec_name, share) in enumerate(zip(("fp32", "bf16", "int8"), factors.values(), strict=True)):
            codec = get_codec(codec_name)
            payload = codec.encode(_values(seed=16 * round_number + place + 2))
            digest.update(payload)
            parts.append((share, codec.decode(payload, NUM_VALUES)))
        nesterov_step(weights, weighted_mean(parts), momentum, lr=LR, mu=MU)
        for values in plain_bytes(weights, momentum):
            digest.update(values)
    return digest.hexdigest()


def _values(seed: int) -> torch.Tensor:
    """fp32 [NUM_VALUES], made from integers alone: most near 1, but each 16th index tiny, down to denormals, always."""
    index = torch.arange(NUM_VALUES, dtype=torch.int64)
    state = index + seed * NUM_VALUES
    for _ in range(3):
        state = (state * 1_664_525 + 1_013_904_223) & 0xFFFF_FFFF  # Numerical Recipes' generator, and its bits stirred
        state = state ^ (state >> 15)
    exponent = torch.where(index % 16 == 0, (state >> 23) % 4, 120 + (state >> 23) % 8)
    sign = (state & 1) << 31
    bits = sign | exponent << 23 | state & 0x7F_FFFF
    return bits.to(torch.int32).view(torch.float32)
