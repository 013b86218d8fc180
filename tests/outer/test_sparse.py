"""Sparse vectors: whatever is done with one has the bits of the same operations on the whole vector."""

import numpy as np
import pytest
import torch

from composer_prime.outer.aggregate import weighted_mean
from composer_prime.outer.codecs import CODECS, get_codec, is_sparse
from composer_prime.outer.payloads import code, decode, decode_whole, plan_slices
from composer_prime.outer.sparse import Sparse, dense, weighted_sum

NUMEL = 20_000


def drawn(seed: int, scale: float = 1e-3) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * scale


def few(seed: int, scale: float = 1e-3) -> Sparse:
    codec = get_codec("topk")
    assert is_sparse(codec)
    return codec.decode_sparse(codec.encode(drawn(seed, scale)), NUMEL)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()


def test_only_topk_is_read_as_a_sparse_vector_and_it_is_the_one_that_decode_gives():
    assert [name for name, codec in CODECS.items() if is_sparse(codec)] == ["topk"]
    codec = get_codec("topk")
    vector = few(0)
    assert same_bits(vector.dense(), codec.decode(codec.encode(drawn(0)), NUMEL))
    assert (np.diff(vector.places) > 0).all() and vector.numel() == NUMEL


def test_subtracting_one_is_subtracting_the_whole_vector():
    x, vector = drawn(1), few(2)
    x[::7] = -0.0
    expected = x - vector.dense()
    vector.subtract_from(x)
    assert same_bits(x, expected)


@pytest.mark.parametrize("sites", [1, 2, 5])
def test_the_mean_of_sparse_vectors_is_that_of_whole_ones(sites):
    parts = [(float(np.float32((site + 1) / 17)), few(site)) for site in range(sites)]
    whole = [(multiplier, vector.dense()) for multiplier, vector in parts]
    assert same_bits(weighted_mean(parts), weighted_mean(whole))


def test_products_that_vanish_below_zero_are_added_up_as_whole_vectors():
    tiny = [Sparse(4, np.array([1]), np.array([-1e-38], np.float32)), Sparse(4, np.array([2]), np.ones(1, np.float32))]
    parts = [(float(np.float32(1e-30)), vector) for vector in tiny]
    assert weighted_sum(parts) is None
    for some in (parts[:1], parts):
        whole = [(multiplier, vector.dense()) for multiplier, vector in some]
        assert same_bits(weighted_mean(some), weighted_mean(whole))


@pytest.mark.parametrize("name", list(CODECS))
def test_a_payload_read_whole_holds_what_was_coded(name):
    codec, x = get_codec(name), drawn(3)
    plan = plan_slices(NUMEL, 4, (codec,))
    coded = code(codec, x, plan)
    read = decode_whole(codec, coded.data, coded.digests, coded.norms, plan)
    again = decode(codec, coded.data, coded.digests, coded.norms, plan, 0, plan.num_slices)
    assert same_bits(dense(read), dense(coded.decoded)) and same_bits(dense(read), again)
