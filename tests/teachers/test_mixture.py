"""The mixture of candidates against a plain loop in fp64, and which teachers drop out of which token."""

import math

import numpy as np
import pytest

from composer_prime.teachers.candidates import EMPTY, Candidates
from composer_prime.teachers.mixture import mix, usable_rows

from .drawn import as_dict, draw, same


def plain_mixture(teachers: list[tuple[float, Candidates]], token: int) -> dict[int, float]:
    """Probability by id, from the definition."""
    told = [(weight, as_dict(c, token), math.exp(c.tail[token])) for weight, c in teachers if c.has_teacher[token]]
    union = {one for _, listed, _ in told for one in listed}
    share = math.fsum(weight for weight, _, _ in told)
    mixed = dict.fromkeys(union, 0.0)
    for weight, listed, tail in told:
        num_missing = len(union - set(listed))
        bound = min(math.exp(min(listed.values())), tail / (num_missing + 1))
        for one in union:
            mixed[one] += weight / share * (math.exp(listed[one]) if one in listed else bound)
    return mixed


@pytest.mark.parametrize("seed", range(8))
def test_the_mixture_is_the_weighted_mean_over_the_union_of_candidates(seed: int) -> None:
    rng = np.random.default_rng(seed)
    teachers = [(float(rng.uniform(0.1, 4)), draw(rng, 25, int(rng.integers(1, 9)), 20)) for _ in range(3)]
    k = int(rng.integers(1, 25))
    found = mix(teachers, k)
    for token in range(25):
        exact, mine = plain_mixture(teachers, token), as_dict(found, token)
        assert len(mine) == min(k, len(exact)), seed
        assert sorted(exact.values(), reverse=True)[: len(mine)] == pytest.approx(
            [math.exp(value) for value in mine.values()], rel=1e-6
        ), seed
        assert {one: exact[one] for one in mine} == pytest.approx(
            {one: math.exp(value) for one, value in mine.items()}, rel=1e-6
        ), seed


def test_results_are_sorted_with_distinct_ids_and_hold_at_most_all_probability() -> None:
    rng = np.random.default_rng(1)
    found = mix([(1.0, draw(rng, 200, 8, 12)), (2.0, draw(rng, 200, 6, 12))], 14)
    assert (found.logprobs[:, :-1] >= found.logprobs[:, 1:]).all()
    assert (np.exp(found.logprobs.astype(np.float64)).sum(axis=1) < 1 + 1e-6).all()
    for row in found.ids:
        filled = row[row != EMPTY]
        assert len(set(filled.tolist())) == len(filled)
        assert (row[: len(filled)] != EMPTY).all()


@pytest.mark.parametrize("k", [1, 3, 8, 11])
def test_one_teacher_alone_gives_itself_cut_to_k_bit_for_bit(k: int) -> None:
    teacher = draw(np.random.default_rng(2), 100, 8, 1000)
    teacher.ids[0, :3], teacher.logprobs[0, :3] = [9, 4, 7], [-1.5, -1.5, -1.5]  # a tie keeps the teacher's order
    teacher.ids[0, 3:], teacher.logprobs[0, 3:] = EMPTY, -np.inf
    found = mix([(0.3, teacher)], k)
    cut = min(k, 8)
    assert same(
        Candidates(found.ids[:, :cut], found.logprobs[:, :cut]),
        Candidates(teacher.ids[:, :cut], teacher.logprobs[:, :cut]),
    )
    assert (found.ids[:, cut:] == EMPTY).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.002, -9999.0, -12000.0])
def test_a_number_that_is_none_drops_its_teacher_from_that_token_alone(bad: float) -> None:
    rng = np.random.default_rng(3)
    sound, other = draw(rng, 4, 5, 50, absent=0), draw(rng, 4, 5, 50, absent=0)
    spoilt = Candidates(other.ids.copy(), other.logprobs.copy())
    spoilt.logprobs[2, 0] = bad
    assert usable_rows(spoilt).tolist() == [True, True, False, True]
    found, before = mix([(1.0, sound), (1.0, spoilt)], 5), mix([(1.0, sound), (1.0, other)], 5)
    assert same(found[[0, 1, 3]], before[[0, 1, 3]])
    assert same(found[[2]], sound[[2]])


def test_a_number_a_rounding_above_zero_stays() -> None:
    certain = Candidates(np.array([[7]], np.int32), np.array([[5e-4]], np.float32))
    assert same(mix([(1.0, certain)], 1), certain)


def test_a_token_without_any_teacher_has_none() -> None:
    assert same(mix([(1.0, Candidates.none(3, 4)), (1.0, Candidates.none(3, 2))], 5), Candidates.none(3, 5))
