"""Two streams in one array: bit-equal after the way, as small as promised, and other arrays are refused."""

import numpy as np
import pytest

from composer_prime.teachers.candidates import Candidates
from composer_prime.teachers.carrier import pack, unpack

from .drawn import draw, same


def test_two_streams_return_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    replay, hint = draw(rng, 50, 8, 151_936), draw(rng, 50, 8, 151_936)
    array = pack(replay, hint, 2)
    assert array.shape == (50, 4, 8) and array.dtype == np.int32
    found = unpack(array)
    assert same(found[0], replay) and same(found[1], hint)


def test_streams_that_take_turns_return_bit_for_bit_from_one() -> None:
    rng = np.random.default_rng(1)
    replay, hint = draw(rng, 50, 8, 151_936, absent=0), draw(rng, 50, 8, 151_936, absent=0)
    replay.ids[::2], replay.logprobs[::2] = -1, -np.inf
    hint.ids[1::2], hint.logprobs[1::2] = -1, -np.inf
    array = pack(replay, hint, 1)
    assert array.shape == (50, 2, 8)
    found = unpack(array)
    assert same(found[0], replay) and same(found[1], hint)


@pytest.mark.parametrize("num_streams", [1, 2])
def test_a_stream_of_none_returns_without_teachers(num_streams: int) -> None:
    stream = draw(np.random.default_rng(2), 20, 4, 100)
    for streams in ((stream, None), (None, stream)):
        found = unpack(pack(*streams, num_streams))
        for before, after in zip(streams, found, strict=True):
            assert same(after, before or Candidates.none(20, 4))


@pytest.mark.parametrize("rows", [2, 4])
def test_zeros_mean_no_teacher(rows: int) -> None:
    for found in unpack(np.zeros((5, rows, 3), np.int32)):
        assert same(found, Candidates.none(5, 3))


def test_streams_that_do_not_fit_are_refused() -> None:
    stream = draw(np.random.default_rng(3), 6, 4, 100, absent=0)
    with pytest.raises(ValueError, match="6 tokens have both teachers, first 0: pack with num_streams 2"):
        pack(stream, stream, 1)
    with pytest.raises(ValueError, match="None have no shape"):
        pack(None, None, 1)


@pytest.mark.parametrize("shape", [(4, 8), (4, 3, 8), (4, 2, 0), (4, 2, 65), (4, 2, 8, 1)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a carrier of shape"):
        unpack(np.zeros(shape, np.int32))


def test_another_dtype_and_mixed_signs_are_refused() -> None:
    with pytest.raises(ValueError, match="int64 must be int32"):
        unpack(np.zeros((1, 2, 2), np.int64))
    array = np.zeros((2, 2, 2), np.int32)
    array[1, 0] = [3, -4]
    with pytest.raises(ValueError, match="token 1 holds both signs"):
        unpack(array)
    swapped = np.zeros((1, 4, 2), np.int32)
    swapped[0, 2] = [3, 0]
    with pytest.raises(ValueError, match="rows 0 and 2"):
        unpack(swapped)
