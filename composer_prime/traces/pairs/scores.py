"""Step scores as advantages: what the teachers approve is kept, whatever they say of the session's other turns."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from composer_prime.traces.pairs.file import Record, StepScore


def turn_advantages(scores: Sequence[float | None]) -> list[float | None]:
    """2 * score - 1, in [-1, 1], for scores in [0, 1]; None where a turn has none."""
    return [None if score is None else 2 * score - 1 for score in scores]


def session_scores(records: Iterable[Record]) -> dict[str, list[float | None]]:
    """By session, the supported score of each turn from 0 to the last that has a record; pairs are passed over."""
    found: dict[str, dict[int, float | None]] = defaultdict(dict)
    for record in records:
        if isinstance(record, StepScore):
            found[record.session][record.turn] = record.supported
    return {session: [turns.get(turn) for turn in range(max(turns) + 1)] for session, turns in found.items()}
