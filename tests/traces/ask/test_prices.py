"""Dollars of a call, in whole nano-dollars: the worst case, the charge, and what servers say about it."""

import random
from decimal import Decimal
from typing import Any

import pytest

from composer_prime.traces.ask.prices import TEMPLATE_TOKENS, Usage, charge, nano_usd, read_usage, usd, worst_case
from tests.traces.ask.text_teacher import FakeTextTeacher

TEACHER = FakeTextTeacher().config("http://127.0.0.1:1", usd_per_million_cached_tokens=0.3, max_tokens=100)


def told(**usage: Any) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 1000, "completion_tokens": 50, **usage}}


def test_the_worst_case_has_a_token_a_byte_and_all_tokens_that_are_allowed() -> None:
    assert worst_case(TEACHER, 5000) == ((5000 + TEMPLATE_TOKENS) * 3 + 100 * 15) * 1000


def test_a_charge_is_by_tokens_with_the_cached_ones_inside_the_prompt() -> None:
    usage = read_usage(told(prompt_tokens_details={"cached_tokens": 400}))
    assert usage == Usage(1000, 400, 0, 50, 0, None)
    assert usage is not None and charge(TEACHER, usage) == (600 * 3 + 50 * 15) * 1000 + 400 * 300


def test_cached_tokens_without_a_price_of_their_own_cost_as_all() -> None:
    plain = FakeTextTeacher().config("http://127.0.0.1:1")
    usage = read_usage(told(prompt_tokens_details={"cached_tokens": 400}))
    assert usage is not None and charge(plain, usage) == (1000 * 3 + 50 * 15) * 1000


def test_a_cost_that_the_server_states_comes_before_tokens_and_with_the_providers_own() -> None:
    usage = read_usage(told(cost=0.25))
    assert usage is not None and charge(TEACHER, usage) == 250_000_000
    own_key = read_usage(told(cost=0.01, is_byok=True, cost_details={"upstream_inference_cost": 0.25}))
    assert own_key is not None and own_key.cost == 260_000_000


@pytest.mark.parametrize(
    "answer", [{}, {"usage": 3}, told(prompt_tokens=-1), told(prompt_tokens=True), told(completion_tokens="7")]
)
def test_a_usage_that_cannot_be_read_is_none(answer: dict[str, Any]) -> None:
    assert read_usage(answer) is None


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf"), True, "0.1", 1e12])
def test_a_stated_cost_that_is_no_amount_is_left_out(cost: Any) -> None:
    usage = read_usage(told(cost=cost))
    assert usage is not None and usage.cost is None


def test_dollars_in_a_file_are_the_same_nano_dollars_when_read() -> None:
    draw = random.Random(0)
    for nano in [0, 1, 999_999_999, *(draw.randrange(10**15) for _ in range(2000))]:
        assert nano_usd(usd(nano)) == nano
    assert nano_usd(Decimal("0.0000000001")) == 1  # up, never down
