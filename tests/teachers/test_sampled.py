"""The mixture against exact fractions, and what becomes of numbers that aren't any."""

import math
import random
from fractions import Fraction

import pytest

from composer_prime.teachers.sampled import CERTAIN, NO_EVIDENCE, NONE_HERE, log_mixture, usable


def exact_mixture(probabilities: list[Fraction | None], weights: list[Fraction]) -> float:
    """log(sum w p / sum w) over the teachers that have a number, rounded once."""
    pairs = [(weight, p) for weight, p in zip(weights, probabilities, strict=True) if p is not None]
    mean = sum((weight * p for weight, p in pairs), Fraction(0)) / sum((weight for weight, _ in pairs), Fraction(0))
    return math.log(mean.numerator) - math.log(mean.denominator)


@pytest.mark.parametrize("seed", range(20))
def test_the_mixture_is_the_weighted_mean_of_probabilities_of_those_that_answered(seed: int) -> None:
    rng = random.Random(seed)
    num_teachers, num_tokens = rng.randint(1, 5), 40
    weights = [Fraction(rng.randint(1, 64), 8) for _ in range(num_teachers)]
    told = [
        [Fraction(rng.randint(1, 2**20 - 1), 2**20) if rng.random() < 0.8 else None for _ in range(num_tokens)]
        for _ in range(num_teachers)
    ]
    logprobs = [[math.nan if p is None else math.log(p) for p in row] for row in told]
    found = log_mixture([(float(w), row) for w, row in zip(weights, logprobs, strict=True)], num_tokens)
    for token, value in enumerate(found):
        column = [row[token] for row in told]
        if all(p is None for p in column):
            assert value == NONE_HERE
        else:
            assert value == pytest.approx(exact_mixture(column, weights), abs=1e-12)


def test_one_teacher_alone_is_given_as_it_is_whatever_its_weight() -> None:
    logprobs = [-0.5, -3.25, -40.0]
    assert log_mixture([(0.125, logprobs)], 3) == pytest.approx(logprobs, abs=1e-15)


def test_probabilities_below_the_least_float_keep_their_logarithm() -> None:
    (found,) = log_mixture([(1.0, [-2000.0]), (3.0, [-2001.0])], 1)
    assert found == pytest.approx(-2000.0 + math.log((1 + 3 * math.exp(-1)) / 4), abs=1e-12)


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf, NO_EVIDENCE, -1e6, 0.5])
def test_a_number_that_is_none_drops_its_teacher_from_that_token_alone(nothing: float) -> None:
    assert usable([nothing, -1.0]).tolist() == [False, True]
    first, second = log_mixture([(1.0, [nothing, -1.0]), (1.0, [-2.0, -1.0])], 2)
    assert first == pytest.approx(-2.0, abs=1e-15)
    assert second == pytest.approx(-1.0, abs=1e-15)


def test_a_certain_teacher_is_not_taken_for_none() -> None:
    assert log_mixture([(1.0, [0.0, 1e-4])], 2) == [CERTAIN, CERTAIN]
    assert log_mixture([], 2) == [NONE_HERE, NONE_HERE]
    assert log_mixture([(1.0, [])], 0) == []
