"""How a served model is asked for prompt logprobs, and how its answer is read: two routes, one shape behind them.

`/v1/completions` is what every vLLM server answers; `/inference/v1/generate` is what ours and PRIME-RL's do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from composer_prime.errors import TeacherError
from composer_prime.teachers.candidates import EMPTY, Candidates
from composer_prime.teachers.sampled import NO_EVIDENCE, ROUNDING

Route = Literal["/v1/completions", "/inference/v1/generate"]

ROUTES: tuple[Route, ...] = ("/v1/completions", "/inference/v1/generate")
"""In the order in which a server is tried."""

MOST_IDS = 2**31 - 1
"""Ids below it fit int32, with the 1 added that carrier.py adds."""


class NotSampled(TeacherError):
    """The server gives scores, and no text of its own."""


@dataclass(frozen=True)
class Scores:
    """What a model says to the n tokens of a sequence, each given those before it, at temperature 1.

    logprobs    nats, of the tokens themselves; NaN for the first, and where there is none
    candidates  the likeliest tokens at each place; none for the first
    """

    logprobs: list[float]
    candidates: Candidates


def score_body(
    route: Route, model: str, token_ids: Sequence[int], k: int = 0, *, temperature: float = 1.0
) -> dict[str, Any]:
    """The request for the logprob of every token of a sequence given those before it, and of the k likeliest there.

    temperature  what the one token that has to be sampled is sampled at; it must not change the scores.
    """
    sampling = {"max_tokens": 1, "temperature": temperature, "prompt_logprobs": max(k, 1)}
    if route == "/v1/completions":
        return {"model": model, "prompt": list(token_ids), **sampling}
    return {"model": model, "token_ids": list(token_ids), "sampling_params": sampling}


def sample_body(
    route: Route,
    model: str,
    token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Sequence[int],
    temperature: float,
) -> dict[str, Any]:
    """The request for what a model says after a sequence."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "stop_token_ids": list(stop_token_ids)}
    if route == "/v1/completions":
        whole = {"return_token_ids": True, "skip_special_tokens": False}
        return {"model": model, "prompt": list(token_ids), **sampling, **whole}
    return {"model": model, "token_ids": list(token_ids), "sampling_params": sampling}


def read_sample(route: Route, answer: Any) -> list[int]:
    """The answer to `sample_body`. Raises NotSampled when it has no token ids."""
    try:
        return [int(token) for token in answer["choices"][0]["token_ids"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise NotSampled(f"the answer of {route} has no token ids of what it says ({error!r})") from error


def read_scores(route: Route, answer: Any, token_ids: Sequence[int], k: int = 0, num_ids: int = MOST_IDS) -> Scores:
    """The answer to `score_body`.

    num_ids  of the policy's vocabulary. A candidate that isn't in it is left out alone: its mass falls in the tail

    A number that isn't a log-probability is NaN as a token's own, and leaves its token without candidates.
    Raises TeacherError when the answer has no prompt logprobs at all, or not one entry a token.
    """
    try:
        holder = answer["choices"][0] if route == "/v1/completions" else answer
        entries = holder.get("prompt_logprobs")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TeacherError(f"the answer of {route} has another shape than vLLM's ({error!r})") from error
    if not isinstance(entries, list):
        raise TeacherError(f"the answer of {route} has no prompt_logprobs")
    if len(entries) != len(token_ids):
        raise TeacherError(f"the answer of {route} has {len(entries)} prompt_logprobs for {len(token_ids)} tokens")
    own = [_logprob(entry.get(str(token))) if isinstance(entry, dict) else math.nan
           for entry, token in zip(entries, token_ids, strict=True)]  # fmt: skip
    candidates = Candidates.none(len(entries), k)
    for place, entry in enumerate(entries):
        if k and place and isinstance(entry, dict):
            _fill(candidates, place, entry, num_ids)
    return Scores(own, candidates)


def _fill(candidates: Candidates, place: int, entry: dict[str, Any], num_ids: int) -> None:
    """Put the likeliest of one entry in their slots; nothing when they aren't a distribution."""
    found = {int(token): _logprob(one) for token, one in entry.items() if _is_id(token, num_ids)}
    usable = {token: value for token, value in found.items() if NO_EVIDENCE < value <= ROUNDING}  # never NaN
    likeliest = sorted(usable, key=lambda token: (-usable[token], token))[: candidates.k]
    logprobs = np.array([usable[token] for token in likeliest], np.float32)
    if len(usable) < len(found) or np.exp(logprobs).sum() > 1 + ROUNDING:
        return
    candidates.ids[place, : len(likeliest)] = likeliest
    candidates.logprobs[place, : len(likeliest)] = logprobs


def _is_id(text: str, num_ids: int) -> bool:
    """Whether it spells an id below `num_ids`; a longer text than that bound's isn't parsed."""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(num_ids)) and int(text) < num_ids


def _logprob(found: Any) -> float:
    value = found.get("logprob") if isinstance(found, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # JSON's whole numbers have no bound
        return math.nan


def num_candidates(candidates: Candidates) -> int:
    """The fewest candidates that a token after the first has."""
    return int((candidates.ids[1:] != EMPTY).sum(axis=1).min(initial=candidates.k))
