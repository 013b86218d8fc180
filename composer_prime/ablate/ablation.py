"""The loop of an ablation: run after run, what is done kept, a line each, and the report whatever happens."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from composer_prime.ablate.forecast import CALIBRATION_STEPS, dollars, predicted_s, remaining_s
from composer_prime.ablate.plan import Job
from composer_prime.ablate.report import write_report
from composer_prime.ablate.rows import Row
from composer_prime.config.ablate import left_out
from composer_prime.config.load import recipe_from_data
from composer_prime.errors import ComposerPrimeError

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
            with console.status(_say(f"{place} runs", began, jobs, rows)):
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
            line = (
                f"{place}: held-out {row.held_out:.3f} after {row.generated_tokens:,} tokens in {_clock(row.seconds)}"
            )
            console.print(_say(line, began, jobs, rows), markup=False, highlight=False, soft_wrap=True)
    finally:
        if rows:
            path = write_report(jobs, rows, failed, usd_per_hour=usd_per_hour)
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def finished_rows(jobs: Sequence[Job]) -> dict[Job, Row]:
    """The rows there are, by their job, in its order."""
    found = ((job, job.finished()) for job in jobs)
    return {job: row for job, row in found if row is not None}


def dry_run(jobs: Sequence[Job], runner: Runner, console: Console, *, usd_per_hour: float | None = None) -> None:
    """Print the runs with predicted time and cost, and make none of them.

    Where no run was timed yet, CALIBRATION_STEPS steps of the first arm are, once, in a folder of their own.
    """
    rows = finished_rows(jobs)
    _say_left_out(jobs, console)
    calibration = None
    if not rows:
        job = calibration_job(jobs[0])
        calibration = job.finished()
        if calibration is None:
            console.print(f"timing {CALIBRATION_STEPS} steps of {job.arm.name}, without an outer loop ...")
            calibration = runner(job, lambda: False)
    console.print(draw_jobs(jobs, rows, calibration, usd_per_hour))
    source = (
        f"finished runs, of the same arm where there are some ({len(rows)} of {len(jobs)} done)"
        if rows
        else f"{CALIBRATION_STEPS} steps of {jobs[0].arm.name} and one held-out evaluation on this machine; "
        "other arms as this one, so without what teachers or hints add"
    )
    console.print(f"Predicted from {source}.", soft_wrap=True, highlight=False)


def calibration_job(job: Job) -> Job:
    """The job cut to CALIBRATION_STEPS steps, without bucket and schedule, in a folder of this arm's recipe."""
    folder = job.folder / "calibration" / job.arm.sha256[:12]
    data = job.recipe.to_data()
    data.pop("outer", None)
    data.get("trainer", {}).pop("scheduler", None)  # it may be longer than these steps
    steps = min(CALIBRATION_STEPS, job.recipe.max_steps)
    recipe = recipe_from_data({**data, "max_steps": steps, "output_dir": str(folder)})
    return dataclasses.replace(job, recipe=recipe, folder=folder, measures_start=False)


def draw_jobs(
    jobs: Sequence[Job], rows: Mapping[Job, Row], calibration: Row | None, usd_per_hour: float | None
) -> Table:
    """A line a run: what it is, whether it is done, and the time and dollars it took or is predicted to take."""
    table = Table(title=f"ablation in {jobs[0].folder}", title_justify="left")
    for column in ("arm", "seed", "state"):
        table.add_column(column)
    for column in ("time", "USD"):
        table.add_column(column, justify="right")
    left = 0.0
    for job in jobs:
        row = rows.get(job)
        seconds = row.seconds if row is not None else predicted_s(job, rows, calibration)
        left += 0.0 if row is not None or seconds is None else seconds
        state = "done" if row is not None else "to continue" if job.run.root.exists() else "to do"
        table.add_row(job.arm.name, str(job.seed), state, _clock(seconds), show_usd(dollars(seconds, usd_per_hour)))
    table.add_section()
    count = f"{len(jobs) - len(rows)} runs"
    table.add_row("left", "", count, _clock(left), show_usd(dollars(left, usd_per_hour)))
    return table


def show_usd(amount: float | None) -> str:
    """Dollars for people, "-" where the price isn't known."""
    return "-" if amount is None else f"{amount:,.2f}" if amount >= 1 else f"{amount:.4f}"


def _say_left_out(jobs: Sequence[Job], console: Console) -> None:
    for line in left_out([job.arm for job in jobs]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _say(line: str, began: float, jobs: Sequence[Job], rows: Mapping[Job, Row]) -> str:
    left = remaining_s(jobs, rows)
    remaining = "" if left is None else f", about {_clock(left)} left"
    return f"{line}; {_clock(time.monotonic() - began)} elapsed{remaining}"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
