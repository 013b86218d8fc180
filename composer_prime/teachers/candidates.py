"""A teacher's distribution at each token of a sequence: its k likeliest tokens, and one tail for all others. No torch.

A token has a teacher where its first slot is filled. The tail isn't stored: it is what the slots leave of 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from composer_prime.config.distill import LEAST_TAIL, MAX_K

EMPTY = -1
"""The id in a slot that holds no token; its log-probability is -inf."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Distributions at n tokens, each over the token that stands there, given those before it.

    ids       int32 (n, k), k at most `MAX_K`; the likeliest first; `EMPTY` where there are fewer, after the others
    logprobs  fp32 (n, k), nats, at temperature 1; -inf where empty
    """

    ids: np.ndarray
    logprobs: np.ndarray

    def __post_init__(self) -> None:
        assert self.ids.shape == self.logprobs.shape and self.ids.ndim == 2, (self.ids.shape, self.logprobs.shape)
        assert self.ids.shape[1] <= MAX_K, self.ids.shape
        assert self.ids.dtype == np.int32 and self.logprobs.dtype == np.float32, (self.ids.dtype, self.logprobs.dtype)

    @classmethod
    def none(cls, num_tokens: int, k: int) -> Self:
        """No teacher anywhere."""
        return cls(np.full((num_tokens, k), EMPTY, np.int32), np.full((num_tokens, k), -np.inf, np.float32))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, places: slice | np.ndarray | Sequence[int]) -> Self:
        """The distributions at some of the tokens."""
        return type(self)(self.ids[places], self.logprobs[places])

    @property
    def k(self) -> int:
        return self.ids.shape[1]

    @property
    def has_teacher(self) -> np.ndarray:
        """bool (n,): where there is a distribution."""
        return self.ids[:, 0] != EMPTY if self.k else np.zeros(len(self), bool)

    @property
    def tail(self) -> np.ndarray:
        """fp64 (n,), nats: log of what the slots leave of 1, at least log `LEAST_TAIL`; 0 without a teacher."""
        left = 1.0 - np.exp(self.logprobs.astype(np.float64)).sum(axis=1)
        return np.log(np.maximum(left, LEAST_TAIL))
