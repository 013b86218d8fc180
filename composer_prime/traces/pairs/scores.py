"""Step scores as advantages: a turn is better or worse than its session's others."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from composer_prime.traces.pairs.file import Record, StepScore

ROUNDING = 1e-9
"""Scores that differ by less are equal: they are quotients of sums of weights."""


def turn_advantages(scores: Sequence[float | None]) -> list[float | None]:
    """Advantages in [-1, 1] for the turns of one session: score minus mean, over the largest such distance.

    scores  in [0, 1], one a turn; None where a turn has none, which takes no part and stays None

    All 0 where the scores are equal. The sum is 0 to rounding.
    """
    known = [score for score in scores if score is not None]
    if not known or max(known) - min(known) < ROUNDING:
        return [None if score is None else 0.0 for score in scores]
    mean = math.fsum(known) / len(known)
    scale = max(max(known) - mean, mean - min(known))
    return [None if score is None else (score - mean) / scale for score in scores]


def session_scores(records: Iterable[Record]) -> dict[str, list[float | None]]:
    """By session, the score of each turn from 0 to the last that has one; pairs among the records are passed over."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        if isinstance(record, StepScore):
            found[record.session][record.turn] = record.score
    return {session: [turns.get(turn) for turn in range(max(turns) + 1)] for session, turns in found.items()}
