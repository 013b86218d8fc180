"""The loop of an ablation: run after run, what is done kept, a line each, and the report whatever happens."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table

from composer_prime.ablate.plan import Job, Row
from composer_prime.ablate.report import write_report
from composer_prime.config.ablate import left_out
from composer_prime.errors import ComposerPrimeError
from composer_prime.plan.prices import dollars

Runner = Callable[[Job, Callable[[], bool]], Row | None]
"""Trains and judges one job and writes its row, as `runner.run_job`; None when it was stopped."""

INTERRUPTED_EXIT = 130


def ablate(
    jobs: Sequence[Job],
    runner: Runner,
    console: Console,
    *,
    usd_per_hour: float | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Make every run that has no row yet, one after another, and write the report; the exit code.

    0 when all runs are done, 130 when stopped, 1 when a run failed: the others were made all the same. Rows are kept in
    each case, and the same call goes on from them.
    """
    began = time.monotonic()
    rows = finished_rows(jobs)
    _say_left_out(jobs, console)
    if rows:
        console.print(f"{len(rows)} of {len(jobs)} runs are done already", highlight=False)
    failed: dict[Job, str] = {}
    try:
        for number, job in enumerate(jobs, 1):
            if job in rows:
                continue
            place = f"[{number}/{len(jobs)}] {job.label}"
            with console.status(f"{place} runs"):
                try:
                    row = None if is_stopped() else runner(job, is_stopped)
                except ComposerPrimeError as error:
                    failed[job] = str(error)
                    console.print(f"{place} failed: {error}", markup=False, highlight=False)
                    continue
            if row is None:
                console.print("Stopped. The same command goes on from here.")
                return INTERRUPTED_EXIT
            rows[job] = row
            spent, left = _clock(time.monotonic() - began), _clock(remaining_s(jobs, rows))
            line = (
                f"{place}: held-out {row.held_out:.3f} after {row.generated_tokens:,} tokens in {_clock(row.seconds)}"
            )
            console.print(f"{line}; {spent} elapsed, about {left} left", markup=False, highlight=False, soft_wrap=True)
    finally:
        if rows:
            path = write_report(jobs, rows, failed, usd_per_hour=usd_per_hour)
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def finished_rows(jobs: Sequence[Job]) -> dict[Job, Row]:
    """The rows there are, by their job, in its order."""
    found = ((job, job.finished()) for job in jobs)
    return {job: row for job, row in found if row is not None}


def dry_run(jobs: Sequence[Job], console: Console, *, usd_per_hour: float | None = None) -> None:
    """Print the runs, and the time and dollars that each took or is predicted to take; make none of them."""
    rows = finished_rows(jobs)
    _say_left_out(jobs, console)
    table = Table(title=f"ablation in {jobs[0].folder}", title_justify="left")
    for column in ("arm", "seed", "state"):
        table.add_column(column)
    for column in ("time", "USD"):
        table.add_column(column, justify="right")

    def add(arm: str, seed: str, state: str, seconds: float | None) -> None:
        cost = dollars(seconds, usd_per_hour)
        shown = "-" if cost is None else f"{cost:,.2f}" if cost >= 1 else f"{cost:.4f}"
        table.add_row(arm, seed, state, _clock(seconds), shown)

    for job in jobs:
        row = rows.get(job)
        state = "done" if row is not None else "to continue" if job.run.root.exists() else "to do"
        add(job.arm.name, str(job.seed), state, row.seconds if row is not None else predicted_s(job, rows))
    table.add_section()
    add("left", "", f"{len(jobs) - len(rows)} runs", remaining_s(jobs, rows))
    console.print(table)
    source = (
        f"{len(rows)} of {len(jobs)} runs, of the same arm where there are some" if rows else "the first that is done"
    )
    console.print(f"Times are predicted from {source}.", soft_wrap=True, highlight=False)


def predicted_s(job: Job, rows: Mapping[Job, Row]) -> float | None:
    """Seconds that a run will take, by its steps: from finished runs of its arm, else of any arm; None without one."""
    timed = [row for other, row in rows.items() if other.arm.name == job.arm.name] or list(rows.values())
    return fmean(row.seconds / row.steps * job.recipe.max_steps for row in timed) if timed else None


def remaining_s(jobs: Sequence[Job], rows: Mapping[Job, Row]) -> float | None:
    """Seconds of all the runs without a row; None while there is no row."""
    return sum(predicted_s(job, rows) or 0.0 for job in jobs if job not in rows) if rows else None


def _say_left_out(jobs: Sequence[Job], console: Console) -> None:
    for line in left_out([job.arm for job in jobs]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
