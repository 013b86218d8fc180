"""Draws the next token of every row of a batch, and its log-probability under the temperature-scaled policy.

By inverting the cumulative distribution at one uniform number per row, so that a row's draw depends on its own seed
and logits alone, never on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability.

    logits       fp32, (rows, vocabulary).
    temperature  fp32, (rows,); 0 takes the likeliest token, whose log-probability is then that at temperature 1.
    top_p        fp32, (rows,), in (0, 1]; 1 allows every token. It changes what is chosen, not the log-probability.
    uniform      fp64, (rows,), in [0, 1).

    Returns tokens, int64 (rows,), and log-probabilities, fp32 (rows,): NaN where a row's logits aren't finite numbers.
    """
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    allowed = logprobs.double().exp()
    if bool((top_p < 1).any()):
        allowed = _nucleus(allowed, top_p.double())
    cumulative = allowed.cumsum(dim=-1)
    total = cumulative[:, -1]
    # In fp64 u < 1 gives u * total < total, so the token found has a probability; where there is NaN, none is found.
    tokens = torch.searchsorted(cumulative, (uniform * total)[:, None], right=True)[:, 0]
    tokens = tokens.clamp_(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens, torch.where(total.isfinite(), chosen, torch.nan)


def likeliest(logits: Tensor, temperature: Tensor, k: int) -> dict[int, float]:
    """The k likeliest tokens of one row, the likeliest first, with log-probabilities as `draw` takes them.

    logits       fp32, (vocabulary,).
    temperature  fp32, (); 0 counts as 1.
    """
    top = torch.log_softmax(logits / torch.where(temperature == 0, 1.0, temperature), dim=-1).topk(min(k, len(logits)))
    return dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """The same with zeros outside the smallest set of likeliest tokens that has probability `top_p` or more."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = torch.where(before < top_p[:, None], ordered, 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)
