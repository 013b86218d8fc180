"""Two streams of candidates, "replay" and "hint", as one int32 array a sequence: what travels with a training sample.

Zeros mean "no teacher", so that padding a batch adds none. A run that uses one stream a token pays for one.
"""

import numpy as np

from composer_prime.config.distill import MAX_K
from composer_prime.teachers.candidates import EMPTY, Candidates

ROWS = 2
"""Rows of a stream: ids + 1, negative in a hint; and the bits of fp32 log-probabilities."""


def pack(replay: Candidates | None, hint: Candidates | None, num_streams: int) -> np.ndarray:
    """Both streams in int32 (n, 2 * num_streams, k): 8 * k bytes a token and stream.

    replay, hint  candidates of the same n tokens and one k; None: the stream has no teacher anywhere
    num_streams   1: at most one of the two at each token; 2: rows 0 and 1 hold replay, rows 2 and 3 the hint

    Raises ValueError if both are None, or both have a teacher at a token of one stream.
    """
    given = [stream for stream in (replay, hint) if stream is not None]
    if not given:
        raise ValueError("two streams of None have no shape: give Candidates.none for one of them")
    coded = [_rows(stream, sign, given[0].ids.shape) for stream, sign in ((replay, 1), (hint, -1))]
    if num_streams == 2:
        return np.concatenate(coded, axis=1)
    both = (coded[0][:, 0] != 0).any(axis=1) & (coded[1][:, 0] != 0).any(axis=1)
    if both.any():
        raise ValueError(f"{both.sum()} tokens have both teachers, first {both.argmax()}: pack with num_streams 2")
    return coded[0] | coded[1]  # one of the two is 0 at each token


def unpack(array: np.ndarray) -> tuple[Candidates, Candidates]:
    """The streams (replay, hint) that `pack` put into int32 (n, 2 or 4, k), bit for bit; memory of their own.

    Raises ValueError if the shape or dtype is another, or a row's signs aren't those of one stream.
    """
    if array.dtype != np.int32:
        raise ValueError(f"a carrier of {array.dtype} must be int32: don't convert it on the way")
    if array.ndim != 3 or array.shape[1] not in (ROWS, 2 * ROWS) or not 1 <= array.shape[2] <= MAX_K:
        raise ValueError(
            f"a carrier of shape {array.shape} must be (tokens, 2 or 4, k), k from 1 to {MAX_K}: give what pack made"
        )
    coded, bits = array[:, 0], array[:, 1]
    if array.shape[1] == ROWS:
        mixed = (coded > 0).any(axis=1) & (coded < 0).any(axis=1)
        if mixed.any():
            raise ValueError(f"token {mixed.argmax()} holds both signs in one stream: give what pack made")
        return _stream(coded, bits, 1), _stream(coded, bits, -1)
    hints, hint_bits = array[:, 2], array[:, 3]
    if (coded < 0).any() or (hints > 0).any():
        raise ValueError("rows 0 and 2 must hold replay (from 0 up) and hint (from 0 down): give what pack made")
    return _stream(coded, bits, 1), _stream(hints, hint_bits, -1)


def _rows(stream: Candidates | None, sign: int, shape: tuple[int, ...]) -> np.ndarray:
    """int32 (n, 2, k) of one stream; zeros where empty."""
    if stream is None:
        return np.zeros((shape[0], ROWS, shape[1]), np.int32)
    filled = stream.ids != EMPTY
    bits = np.ascontiguousarray(stream.logprobs).view(np.int32)
    return np.stack([np.where(filled, sign * (stream.ids + 1), 0), np.where(filled, bits, 0)], axis=1)


def _stream(coded: np.ndarray, bits: np.ndarray, sign: int) -> Candidates:
    """The candidates whose ids have this sign."""
    filled = coded * sign > 0
    logprobs = np.where(filled, np.ascontiguousarray(bits).view(np.float32), np.float32(-np.inf))
    return Candidates(np.where(filled, np.abs(coded) - 1, EMPTY).astype(np.int32), logprobs)
