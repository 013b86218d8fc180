"""From the logprobs of several teachers to one number a token: the log of their weighted mixture.

The loss has room for one reference stream, so the teachers are reduced before: arithmetic mean of probabilities, in
log space, over those that gave a number for the token.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

NO_EVIDENCE = -9999.0
"""What vLLM says where it has no logprob, and its lower clamp: no evidence either way."""

NONE_HERE = 0.0
"""What the loss and PRIME-RL's wire read as "no teacher here"."""

CERTAIN = -1e-9
"""Stands for a mixture of probability 1, whose own logarithm is `NONE_HERE`."""

ROUNDING = 1e-3
"""Nats above 0 that a logprob computed in bf16 may have."""

Weighted: TypeAlias = tuple[float, Sequence[float]]
"""A teacher's weight, greater than 0, and its logprobs in nats, one a token; NaN where it has none."""


def usable(logprobs: Sequence[float]) -> np.ndarray:
    """bool, (tokens,): where a teacher's number is one: finite, above vLLM's clamp, and no probability beyond 1."""
    values = np.asarray(logprobs, dtype=np.float64)
    return np.isfinite(values) & (values > NO_EVIDENCE) & (values <= ROUNDING)


def log_mixture(teachers: Sequence[Weighted], num_tokens: int) -> list[float]:
    """log(sum_k w_k p_k / sum_k w_k) for each token, k over the teachers with a usable number for it.

    `NONE_HERE` for a token that none answered; a mixture that is 1 to rounding is `CERTAIN`. Computed in fp64 by
    logsumexp, so that probabilities far below fp64's least keep their logarithm.
    """
    if not teachers or not num_tokens:
        return [NONE_HERE] * num_tokens
    logprobs = np.array([values for _, values in teachers], dtype=np.float64)
    answered = np.stack([usable(values) for values in logprobs])
    weights = np.array([weight for weight, _ in teachers], dtype=np.float64)[:, None]
    terms = np.where(answered, np.where(answered, logprobs, 0.0) + np.log(weights), -np.inf)
    has_teacher = answered.any(axis=0)
    largest = np.where(has_teacher, terms.max(axis=0), 0.0)
    total = np.where(has_teacher, np.exp(terms - largest).sum(axis=0), 1.0)
    share = np.where(has_teacher, (weights * answered).sum(axis=0), 1.0)
    mixture = np.minimum(largest + np.log(total) - np.log(share), CERTAIN)
    return np.where(has_teacher, mixture, NONE_HERE).tolist()
