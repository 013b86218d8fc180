"""How a served model is asked for prompt logprobs, and how its answer is read: two routes, one shape behind them.

`/v1/completions` is what every vLLM server answers; `/inference/v1/generate` is what ours and PRIME-RL's do.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from composer_prime.errors import TeacherError

Route = Literal["/v1/completions", "/inference/v1/generate"]

ROUTES: tuple[Route, ...] = ("/v1/completions", "/inference/v1/generate")
"""In the order in which a server is tried."""


def score_body(route: Route, model: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """The request for the logprob of every token of a sequence given those before it, at temperature 1."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
    if route == "/v1/completions":
        return {"model": model, "prompt": list(token_ids), **sampling}
    return {"model": model, "token_ids": list(token_ids), "sampling_params": sampling}


def read_scores(route: Route, answer: Any, token_ids: Sequence[int]) -> list[float]:
    """Logprobs in nats, one a token; NaN for the first, and wherever the answer lacks the token's own number.

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
    return [_logprob(entry, token) for entry, token in zip(entries, token_ids, strict=True)]


def _logprob(entry: Any, token: int) -> float:
    """The token's own number among those of its place: a JSON object by token id."""
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    value = found.get("logprob") if isinstance(found, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
