"""How long the runs that are left will take, from runs that were timed.

A run takes its start (up to the end of its first step), a step's time for each later one, and its held-out evaluations.
"""

from collections.abc import Mapping, Sequence

from composer_prime.ablate.plan import Job
from composer_prime.ablate.rows import Row

CALIBRATION_STEPS = 4
"""The first is part of the start, and a later one alone varies by a factor of two."""


def predicted_s(job: Job, rows: Mapping[Job, Row], calibration: Row | None = None) -> float | None:
    """Seconds that a run will take: from finished runs of its arm, else of any arm, else from the calibration.

    None when nothing was timed.
    """
    same = [row for other, row in rows.items() if other.arm.name == job.arm.name]
    timed = same or list(rows.values()) or ([calibration] if calibration is not None else [])
    return sum(_scaled_s(row, job) for row in timed) / len(timed) if timed else None


def remaining_s(jobs: Sequence[Job], rows: Mapping[Job, Row]) -> float | None:
    """Seconds of all the runs without a row; None when nothing was timed."""
    each = [predicted_s(job, rows) for job in jobs if job not in rows]
    known = [seconds for seconds in each if seconds is not None]
    return sum(known) if len(known) == len(each) else None


def _scaled_s(row: Row, job: Job) -> float:
    evaluations = 2 if job.measures_start else 1
    start_s = max(row.run_s - row.later_steps_s, 0.0)
    later_s = row.later_steps_s / max(row.steps - 1, 1) * (job.recipe.max_steps - 1)
    return start_s + later_s + row.held_out_s * evaluations


def dollars(seconds: float | None, usd_per_hour: float | None) -> float | None:
    """What that time costs; None when time or price isn't known."""
    return None if seconds is None or usd_per_hour is None else seconds / 3600 * usd_per_hour
