"""The run's test vector, by docs/protocol.md alone: what a machine must compute to take part."""

import hashlib

import numpy as np

from tests.spec.arithmetic import merge, multipliers, outer_step
from tests.spec.codecs import decode, encode
from tests.spec.layout import Vector

_SIZE = 65_795
_TERMS = {"aggregate": "mean", "weighting": "tokens", "lr": 0.7, "momentum": 0.9}
_TERMS |= {"clip": 1.0, "guest_share": 0.5, "guest_clip": 1.0}


def vector_sha() -> str:
    """The sha256 that a manifest holds."""
    digest = hashlib.sha256()
    master = [_values(1), np.zeros(_SIZE, np.float32)]
    for number in range(3):
        tokens = {"a": 3, "b": 5, "c": 11 + number}
        offers = [{"site": site, "tokens": count, "norms": []} for site, count in tokens.items()]
        factors = multipliers(offers, _TERMS)
        vectors = []
        for place, codec in enumerate(("fp32", "bf16", "int8")):
            payload = encode(codec, _values(16 * number + place + 2)) or b""
            digest.update(payload)
            vectors.append(decode(codec, payload, _SIZE))
        master = outer_step(master, merge(vectors, factors, [False] * 3, _TERMS), _TERMS)
        for vector in master:
            digest.update(vector.astype("<f4").tobytes())
    return digest.hexdigest()


def _values(number: int) -> Vector:
    index = np.arange(_SIZE, dtype=np.uint64)
    state = index + np.uint64(number * _SIZE)
    for _ in range(3):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        state ^= state >> 15
    exponent = np.where(index % 16 == 0, (state >> 23) % 4, 120 + (state >> 23) % 8)
    bits = (state & 1) << 31 | exponent.astype(np.uint64) << 23 | state & 0x7FFFFF
    return bits.astype(np.uint32).view(np.float32)
