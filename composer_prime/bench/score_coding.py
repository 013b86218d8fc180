"""`composer-prime bench score-coding`: bytes a token of teachers' candidates, and what coding and truncating lose.

The teacher is made up, token by token: logits -s log(rank), s uniform from 1 to 2, plus unit Gaussian noise. Ids have
random ranks, alike at all tokens but for a quarter of them, drawn anew at each token, which trade ranks: the context.
"""

from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from composer_prime.replay.score.candidates import EMPTY, Candidates
from composer_prime.replay.score.carrier import pack
from composer_prime.replay.score.coding import decode, encode

VOCABULARIES = (49_152, 151_936)
WIRE_K, CACHE_K = 8, 32
MAX_CACHE_BYTES = 64.0
"""Bar: bytes a token in the cache at k = 32."""
MAX_ADDED_NATS = 1e-3
"""Bar: mean KL that coding adds."""
TRADED = 0.25
"""Share of the ids that trade ranks at a token."""


class Scored(NamedTuple):
    """A made-up teacher's answers."""

    candidates: Candidates
    """Of k = 32."""
    lost: dict[int, np.ndarray]
    """fp64 (n,), nats, by k: KL of the full distribution from its top k with the tail spread evenly over the rest."""


class Figures(NamedTuple):
    """Of one vocabulary; KL in nats a token."""

    wire_bytes: float
    cache_bytes: float
    added: np.ndarray
    """fp64 (n,): KL of top 32 + tail from what decoding gives."""
    lost: dict[int, np.ndarray]


def main(num_tokens: int = 10_000, seed: int = 0) -> None:
    """Run the bench and print its table."""
    table = Table(title=f"score-coding: {num_tokens:,} tokens of a Zipf-like teacher")
    for column in ("vocabulary", "wire B k=8", "cache B k=32", "added mean", "p99.9", "max", "cut k=8", "cut k=32"):
        table.add_column(column, justify="right")
    for vocabulary in VOCABULARIES:
        found = measure(num_tokens, vocabulary, seed)
        table.add_row(
            f"{vocabulary:,}",
            f"{found.wire_bytes:.1f}",
            f"{found.cache_bytes:.1f}",
            f"{found.added.mean():.2e}",
            f"{np.quantile(found.added, 0.999):.2e}",
            f"{found.added.max():.2e}",
            *(f"{found.lost[k].mean():.3f}" for k in (WIRE_K, CACHE_K)),
        )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"bytes and nats a token; bars: cache {MAX_CACHE_BYTES:.0f} bytes, added mean {MAX_ADDED_NATS:g} nats"
    )


def measure(num_tokens: int, vocabulary: int, seed: int = 0) -> Figures:
    """Code a made-up teacher's candidates for the wire and the cache."""
    scored = make_teacher(num_tokens, vocabulary, seed)
    wide = scored.candidates
    wire = pack(Candidates(wide.ids[:, :WIRE_K], wide.logprobs[:, :WIRE_K]), None, num_streams=1)
    block = encode(wide)
    return Figures(
        wire_bytes=wire.nbytes / num_tokens,
        cache_bytes=len(block) / num_tokens,
        added=coding_kl(wide, decode(block)),
        lost=scored.lost,
    )


def coding_kl(before: Candidates, after: Candidates) -> np.ndarray:
    """fp64 (n,), nats: KL of `before` from `after`, over the candidates and the tail; both list the same ids."""
    filled = np.sort(before.ids, axis=1) != EMPTY
    mine, theirs = np.argsort(before.ids, axis=1), np.argsort(after.ids, axis=1)
    assert (np.take_along_axis(before.ids, mine, 1) == np.take_along_axis(after.ids, theirs, 1)).all()
    p = np.where(filled, np.take_along_axis(before.logprobs, mine, 1).astype(np.float64), -np.inf)
    ratio = np.subtract(p, np.take_along_axis(after.logprobs, theirs, 1), where=filled, out=np.zeros(p.shape))
    return (np.exp(p) * ratio).sum(axis=1) + np.exp(before.tail) * (before.tail - after.tail)


def make_teacher(num_tokens: int, vocabulary: int, seed: int = 0) -> Scored:
    """A Zipf-like teacher at `num_tokens` tokens; see the module's text for how it is drawn."""
    rng = np.random.default_rng(seed)
    log_ranks = np.log(rng.permutation(vocabulary) + 1).astype(np.float32)
    noise = rng.standard_normal(2 * vocabulary, dtype=np.float32)  # a token takes a window of it: 10,000 fresh are slow
    order = np.tile(rng.permutation(vocabulary), 2)
    num_traded = int(vocabulary * TRADED)
    candidates = Candidates.none(num_tokens, CACHE_K)
    lost = {k: np.empty(num_tokens) for k in (WIRE_K, CACHE_K)}
    for token in range(num_tokens):
        first, shift, window = rng.integers(vocabulary, size=3)
        ranks = log_ranks.copy()
        traded = order[first : first + num_traded]
        ranks[traded] = np.roll(ranks[traded], int(shift) % num_traded)
        logits = noise[window : window + vocabulary] - np.float32(rng.uniform(1, 2)) * ranks
        logits -= logits.max()
        weights = np.exp(logits)
        total = weights.sum(dtype=np.float64)
        entropy = float(np.log(total) - np.sum(weights * logits, dtype=np.float64) / total)
        best = np.argpartition(logits, vocabulary - CACHE_K)[-CACHE_K:]
        best = best[np.argsort(-logits[best])]
        logprobs = logits[best] - np.log(total)
        candidates.ids[token], candidates.logprobs[token] = best, logprobs
        for k, nats in lost.items():
            nats[token] = cut_kl(entropy, logprobs[:k], vocabulary - k)
    return Scored(candidates, lost)


def cut_kl(entropy: float, kept: np.ndarray, num_rest: int) -> float:
    """Nats: KL of a distribution from its candidates with the tail spread evenly over the rest.

    entropy   nats, of the full distribution
    kept      fp64 (k,), nats, the candidates' log-probabilities; they leave some probability to the rest
    num_rest  ids that are no candidates
    """
    p = np.exp(kept)
    tail = 1 - p.sum()
    return float(-entropy - (p * kept).sum() - tail * np.log(tail / num_rest))
