"""What the environment stamps, written from the carrier's definition: candidates as int32 rows of ids and bits."""

import torch
from torch import Tensor


def stream(ids: Tensor, logprobs: Tensor, hinted: Tensor) -> Tensor:
    """int32 (n, 2, k) of ids (n, k), -1 where empty, their log-probabilities, and by which teacher (n,)."""
    stored = torch.where(hinted.unsqueeze(1), -1, 1) * (ids + 1)
    return torch.stack([stored.to(torch.int32), logprobs.float().contiguous().view(torch.int32)], dim=1)


def drawn(n: int, k: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Candidates of n tokens, likeliest first, with a tail: ids (n, k) and fp32 log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:k] for _ in range(n)])
    every = (2 * torch.randn(n, k + 4, generator=generator)).log_softmax(-1)
    return ids, every.sort(-1, descending=True).values[:, :k]
