"""From the candidates of several teachers to those of their weighted mixture, token by token.

The same semantics as teachers/sampled.py, which mixes the sampled tokens' numbers: an arithmetic mean of probabilities,
in log space, over the teachers that have a distribution for the token.
"""

from collections.abc import Sequence

import numpy as np

from composer_prime.teachers.candidates import EMPTY, Candidates
from composer_prime.teachers.sampled import NO_EVIDENCE, ROUNDING


def usable_rows(candidates: Candidates) -> np.ndarray:
    """bool (n,): where there is a teacher, and each filled slot's number is one.

    A number is finite, above vLLM's clamp of -9999, and at most 1e-3 nat above 0. One bad slot spoils its token.
    """
    values = candidates.logprobs.astype(np.float64)
    good = np.isfinite(values) & (values > NO_EVIDENCE) & (values <= ROUNDING)
    return candidates.has_teacher & (good | (candidates.ids == EMPTY)).all(axis=1)


def mix(teachers: Sequence[tuple[float, Candidates]], k: int) -> Candidates:
    """The k likeliest tokens of the mixture sum_i w_i p_i / sum_i w_i, at each of n tokens.

    teachers  at least one: weights, finite and above 0, and candidates of the same n tokens; each may have its own k
    k         slots of the result, 1 to `config.distill.MAX_K`

    Weights are renormalised at each token over the teachers that `usable_rows` lets in. If a teacher lacks a candidate
    of another, its probability there is unknown: the least it lists bounds it, and so does an equal share of its tail
    over the missing candidates and one more for all other tokens. The smaller bound counts.
    A sole teacher gives its own first k slots, bit for bit. Computed in fp64; the likeliest first, ids distinct.
    """
    num_tokens = len(teachers[0][1])
    usable = [usable_rows(candidates) for _, candidates in teachers]
    ids = np.concatenate(
        [np.where(rows[:, None], c.ids, EMPTY) for rows, (_, c) in zip(usable, teachers, strict=True)], axis=1
    )
    column, num_union = _union(ids)
    place = np.arange(num_tokens)[:, None]

    share = sum((weight * rows for rows, (weight, _) in zip(usable, teachers, strict=True)), np.zeros(num_tokens))
    terms, start = [], 0
    for rows, (weight, candidates) in zip(usable, teachers, strict=True):
        mine = column[:, start : start + candidates.k]
        start += candidates.k
        known = _known(candidates, rows, mine, ids.shape[1])
        bound = _bound(candidates, rows, num_union)
        log_weight = np.log(np.where(rows, weight, 1.0) / np.where(rows, share, 1.0))
        spread = np.where(np.isnan(known), bound[:, None], known) + log_weight[:, None]
        terms.append(np.where(rows[:, None], spread, -np.inf))
    mixture = _logsumexp(np.stack(terms))

    union_ids = np.full((num_tokens, ids.shape[1] + 1), EMPTY, np.int32)
    first = np.full(union_ids.shape, ids.shape[1])
    for slot in reversed(range(ids.shape[1])):  # the first slot of an id writes last
        union_ids[place[:, 0], column[:, slot]] = ids[:, slot]
        first[place[:, 0], column[:, slot]] = slot
    union_ids, first = union_ids[:, :-1], first[:, :-1]
    mixture = np.where(union_ids == EMPTY, -np.inf, mixture)
    best = np.lexsort((first, -mixture), axis=1)[:, :k]
    result = Candidates.none(num_tokens, k)
    result.ids[:, : best.shape[1]] = union_ids[place, best]
    result.logprobs[:, : best.shape[1]] = mixture[place, best]
    return result


def _union(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The union's column that each slot goes to, and the union's size, at each token.

    ids   int32 (n, slots) of all teachers

    Returns int64 (n, slots), equal for equal ids, `slots` for an empty one; and int64 (n,).
    """
    num_tokens, slots = ids.shape
    order = np.argsort(ids, axis=1, kind="stable")
    ranked = np.take_along_axis(ids, order, axis=1)
    is_new = ranked != EMPTY
    is_new[:, 1:] &= ranked[:, 1:] != ranked[:, :-1]
    column = np.empty((num_tokens, slots), np.int64)
    np.put_along_axis(column, order, np.where(ranked == EMPTY, slots, np.cumsum(is_new, axis=1) - 1), axis=1)
    return column, is_new.sum(axis=1)


def _known(candidates: Candidates, rows: np.ndarray, column: np.ndarray, slots: int) -> np.ndarray:
    """fp64 (n, slots): a teacher's numbers in the union's columns; NaN where it lists none."""
    known = np.full((len(candidates), slots + 1), np.nan)
    listed = np.where(rows[:, None] & (candidates.ids != EMPTY), candidates.logprobs.astype(np.float64), np.nan)
    np.put_along_axis(known, column, listed, axis=1)
    return known[:, :-1]


def _bound(candidates: Candidates, rows: np.ndarray, num_union: np.ndarray) -> np.ndarray:
    """fp64 (n,), nats: what a teacher gives to each candidate that it lacks; 0 where it isn't usable."""
    filled = rows[:, None] & (candidates.ids != EMPTY)
    least = np.where(filled, candidates.logprobs, np.inf).min(axis=1, initial=np.inf)
    clean = Candidates(candidates.ids, np.where(filled, candidates.logprobs, np.float32(-np.inf)))
    num_missing = num_union - filled.sum(axis=1)
    return np.where(rows, np.minimum(least, clean.tail - np.log(np.where(rows, num_missing, 0) + 1.0)), 0.0)


def _logsumexp(terms: np.ndarray) -> np.ndarray:
    """Over the first axis; -inf where all are."""
    largest = terms.max(axis=0)
    has_any = largest > -np.inf
    total = np.exp(terms - np.where(has_any, largest, 0.0)).sum(axis=0)
    return np.where(has_any, largest + np.log(np.where(has_any, total, 1.0)), -np.inf)
