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

    prompt_tokens      those from its cache, and those put into it, included, as OpenAI counts
    completion_tokens  reasoning included
    cost               nano-dollars charged, where the server states them
    """

    prompt_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cost: int | None = None


def nano_usd(dollars: float | Decimal) -> int:
    """Dollars as nano-dollars, rounded up."""
    return int((Decimal(str(dollars)) * NANO).to_integral_value(ROUND_CEILING))


def read_dollars(table: Any, name: str) -> int | None:
    """Nano-dollars of an amount in a server's JSON; None where there is none."""
    found = table.get(name) if isinstance(table, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < NANO:
        return None
    return nano_usd(found)


def usd(nano: int) -> float:
    """Nano-dollars as dollars; `nano_usd` gives the same number back."""
    return nano / NANO


def worst_case(teacher: TextTeacher, num_bytes: int) -> int:
    """The most that a request of so many bytes can cost at the file's prices: a token has a byte at least."""
    tokens = num_bytes + TEMPLATE_TOKENS
    writes = tokens if (teacher.usd_per_million_cache_write_tokens or 0) > teacher.usd_per_million_prompt_tokens else 0
    return at_prices(teacher, Usage(tokens, 0, writes, teacher.longest_answer))


def charge(teacher: TextTeacher, usage: Usage) -> int:
    """What a call cost: as the server states it, else by its tokens."""
    return at_prices(teacher, usage) if usage.cost is None else usage.cost


def at_prices(teacher: TextTeacher, usage: Usage) -> int:
    """What so many tokens cost at the file's prices."""
    cached, written = usage.cached_tokens, usage.cache_write_tokens
    plain = teacher.usd_per_million_prompt_tokens
    reads, writes = teacher.usd_per_million_cached_tokens, teacher.usd_per_million_cache_write_tokens
    parts = [
        (plain, max(usage.prompt_tokens - cached - written, 0)),
        (plain if reads is None else reads, cached),
        (plain if writes is None else writes, written),
        (teacher.usd_per_million_completion_tokens, usage.completion_tokens),
    ]
    share = 1 - Decimal(str(teacher.batch_discount)) if teacher.batch else 1
    return nano_usd(share * sum(Decimal(str(price)) * tokens for price, tokens in parts) / 10**6)


def read_usage(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of a chat completion; None where it has none that can be read."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if prompt is None or completion is None:
        return None
    details = usage.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") or _count(usage, "cache_read_input_tokens") or 0
    written = _count(details, "cache_write_tokens") or _count(usage, "cache_creation_input_tokens") or 0
    reasoning = _count(usage.get("completion_tokens_details"), "reasoning_tokens") or 0
    cost = read_dollars(usage, "cost")
    if cost is not None and usage.get("is_byok") is True:  # then OpenRouter's own cost leaves out the provider's
        cost += read_dollars(usage.get("cost_details"), "upstream_inference_cost") or 0
    return Usage(prompt, cached, written, completion, reasoning, cost)


def _count(table: Any, name: str) -> int | None:
    found = table.get(name) if isinstance(table, dict) else None
    return found if type(found) is int and found >= 0 else None
