"""Dollars of a call: the most that it can cost, what it did cost, and whether that is what the teachers' file says.

Amounts are whole nano-dollars (1e-9 USD), rounded up, so that sums are exact in any order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any

from composer_prime.config.text_teachers import TextTeacher

NANO = 10**9

TEMPLATE_TOKENS = 1024
"""Tokens that a server's chat template may add to what is sent: its words on how to call tools."""

PRICE_TOLERANCE = 1.1
"""A charge above the file's prices by more than this factor is another price, and not rounding or a fee."""


@dataclass(frozen=True)
class Usage:
    """What a server says that a call took.

    prompt_tokens      those from its cache included, as OpenAI counts
    completion_tokens  reasoning included
    cost               nano-dollars charged, where the server states them
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cost: int | None


def nano_usd(dollars: float | Decimal) -> int:
    """Dollars as nano-dollars, rounded up."""
    return int((Decimal(str(dollars)) * NANO).to_integral_value(ROUND_CEILING))


def usd(nano: int) -> float:
    """Nano-dollars as dollars; `nano_usd` gives the same number back."""
    return nano / NANO


def worst_case(teacher: TextTeacher, num_bytes: int) -> int:
    """The most that a request of so many bytes can cost at the file's prices: a token has a byte at least."""
    return _at(teacher, num_bytes + TEMPLATE_TOKENS, 0, teacher.max_tokens)


def at_prices(teacher: TextTeacher, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
    """What so many tokens cost at the file's prices."""
    return _at(teacher, max(prompt_tokens - cached_tokens, 0), cached_tokens, completion_tokens)


def charge(teacher: TextTeacher, usage: Usage) -> int:
    """What a call cost: as the server states it, else by its tokens."""
    if usage.cost is not None:
        return usage.cost
    return at_prices(teacher, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def read_usage(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of a chat completion; None where it has none that can be read."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if prompt is None or completion is None:
        return None
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens") or 0
    reasoning = _count(usage.get("completion_tokens_details"), "reasoning_tokens") or 0
    cost = _dollars(usage, "cost")
    if cost is not None and usage.get("is_byok") is True:  # then OpenRouter's own cost leaves out the provider's
        cost += _dollars(usage.get("cost_details"), "upstream_inference_cost") or 0
    return Usage(prompt, cached, completion, reasoning, cost)


def _at(teacher: TextTeacher, prompt: int, cached: int, completion: int) -> int:
    per_cached = teacher.usd_per_million_cached_tokens
    millions = (
        Decimal(str(teacher.usd_per_million_prompt_tokens)) * prompt
        + Decimal(str(teacher.usd_per_million_prompt_tokens if per_cached is None else per_cached)) * cached
        + Decimal(str(teacher.usd_per_million_completion_tokens)) * completion
    )
    return nano_usd(millions / 10**6)


def _count(table: Any, name: str) -> int | None:
    found = table.get(name) if isinstance(table, dict) else None
    return found if type(found) is int and found >= 0 else None


def _dollars(table: Any, name: str) -> int | None:
    found = table.get(name) if isinstance(table, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < NANO:
        return None
    return nano_usd(found)
