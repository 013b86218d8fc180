"""Random candidates for the tests, drawn from a seed."""

import numpy as np

from composer_prime.teachers.candidates import EMPTY, Candidates


def draw(rng: np.random.Generator, num_tokens: int, k: int, vocabulary: int, absent: float = 0.2) -> Candidates:
    """Candidates of random length, likeliest first; a share `absent` of the tokens has no teacher."""
    found = Candidates.none(num_tokens, k)
    for token in range(num_tokens):
        if rng.random() < absent:
            continue
        num_filled = int(rng.integers(1, k + 1))
        ids = rng.choice(vocabulary, num_filled, replace=False)
        p = np.sort(rng.dirichlet(np.full(num_filled + 1, 0.5))[:-1])[::-1] + 1e-6
        found.ids[token, :num_filled] = ids
        found.logprobs[token, :num_filled] = np.log(p / (p.sum() + 1e-3))
    return found


def same(one: Candidates, other: Candidates) -> bool:
    """Whether two are equal bit for bit."""
    bits = one.logprobs.view(np.int32), other.logprobs.view(np.int32)
    return bool(np.array_equal(one.ids, other.ids) and np.array_equal(*bits))


def as_dict(candidates: Candidates, token: int) -> dict[int, float]:
    """Log-probabilities by id at one token."""
    pairs = zip(candidates.ids[token].tolist(), candidates.logprobs[token].tolist(), strict=True)
    return {one: logprob for one, logprob in pairs if one != EMPTY}
