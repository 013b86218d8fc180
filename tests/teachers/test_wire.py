"""What is read of a teacher's answer, whatever stands in it."""

import math
from typing import Any

import pytest

from composer_prime.teachers.candidates import EMPTY
from composer_prime.teachers.carrier import pack, unpack
from composer_prime.teachers.sampled import usable
from composer_prime.teachers.wire import Scores, read_scores

TOKENS = [7, 3, 5]
NUM_IDS = 265


def told(**logprobs: Any) -> dict[str, Any]:
    """vLLM's entry of one token, by ids as text."""
    return {token: {"logprob": logprob} for token, logprob in logprobs.items()}


def read(entry: dict[str, Any], *, k: int = 3, **bounds: int) -> Scores:
    """What is read at `TOKENS`, the second of which has this entry."""
    entries = [None, entry, told(**{"5": -1.0, "6": -2.0})]
    return read_scores("/inference/v1/generate", {"prompt_logprobs": entries}, TOKENS, k, **bounds)


@pytest.mark.parametrize(
    "odd",
    ["265", "2147483647", "4000000000", "9" * 5000, "-1", "\u0663", "one", ""],
    ids=["above", "int32", "int64", "digits", "negative", "arabic", "word", "empty"],
)
def test_a_candidate_outside_the_vocabulary_is_left_out_alone_and_its_mass_falls_in_the_tail(odd: str) -> None:
    found = read(told(**{"3": math.log(0.25), odd: math.log(0.5)}), num_ids=NUM_IDS).candidates
    assert found.ids.tolist() == [[EMPTY] * 3, [3, EMPTY, EMPTY], [5, 6, EMPTY]]
    assert found.tail[1] == pytest.approx(math.log(0.75))


def test_any_id_that_is_read_fits_the_carrier() -> None:
    found = read(told(**{str(2**31 + more): -4.0 for more in range(-3, 3)}), k=6).candidates
    assert sorted(found.ids[1]) == [EMPTY] * 4 + [2**31 - 3, 2**31 - 2]
    assert unpack(pack(found, None, 1))[0].ids.tolist() == found.ids.tolist()


@pytest.mark.parametrize(
    "number",
    [10**400, -(10**400), math.nan, math.inf, -math.inf, 0.5, "1", True, None, []],
    ids=lambda one: str(one)[:6],
)
def test_a_number_that_is_no_logprob_leaves_its_token_without_candidates(number: Any) -> None:
    found = read(told(**{"3": number, "4": -2.0}), num_ids=NUM_IDS)
    assert found.candidates.has_teacher.tolist() == [False, False, True]
    assert usable(found.logprobs).tolist() == [False, False, True]
