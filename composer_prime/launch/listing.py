"""A launch's jobs as people see them: `ps`, and logs of several at once."""

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from composer_prime.errors import BadInput, ComposerPrimeError
from composer_prime.launch.decisions import expenses_of
from composer_prime.launch.fleet import Fleet, Seen
from composer_prime.launch.records import Attempt, LaunchBook, by_site
from composer_prime.visible import json_text, visible

PLAIN_WIDTH = 160


@dataclass(frozen=True)
class Row:
    """One attempt. seconds: that it has run; usd: that it has cost so far, None where the price is unknown."""

    site: str
    attempt: int
    on: str
    job: str
    state: str
    exit_code: int | None
    seconds: float
    usd: float | None
    message: str


def rows(book: LaunchBook, seen: Sequence[Seen], now: float | None = None) -> list[Row]:
    """What a look at a launch shows."""
    now = time.time() if now is None else now
    return [_row(book, each, now) for each in seen]


def _row(book: LaunchBook, seen: Seen, now: float) -> Row:
    attempt, status, ended = seen.attempt, seen.status, seen.attempt.ended
    statuses = {} if status is None else {(attempt.site, attempt.number): status}
    (expense,) = expenses_of([attempt], statuses)
    job = attempt.job(book.name)
    message = seen.problem or (ended.message if ended else status.message if status else "")
    code = ended.exit_code if ended else status.exit_code if status else None
    return Row(
        site=attempt.site,
        attempt=attempt.number,
        on=attempt.record.on,
        job="" if job is None else job.id,
        state=seen.state,
        exit_code=code,
        seconds=expense.seconds(now),
        usd=expense.usd(now),
        message=message,
    )


def draw(found: Sequence[Row], book: LaunchBook, *, as_json: bool) -> None:
    """Print rows as a table, or as JSON lines."""
    if as_json:
        for row in found:
            print(json_text(asdict(row)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=_title(book), title_justify="left")
    for name in ("site", "attempt", "on", "state", "exit", "hours", "$", "job", "message"):
        table.add_column(name, overflow="fold")
    for row in found:
        cost = "?" if row.usd is None else f"{row.usd:.2f}"
        code = "" if row.exit_code is None else str(row.exit_code)
        cells = (
            row.site,
            row.attempt,
            row.on,
            row.state,
            code,
            f"{row.seconds / 3600:.2f}",
            cost,
            row.job,
            row.message,
        )
        table.add_row(*map(visible, cells))
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(table, markup=False)


def _title(book: LaunchBook) -> str:
    stop = book.stopped()
    return f"launch {book.name}" + ("" if stop is None else f", stopped on {stop.by}")


def chosen(book: LaunchBook, site: str | None, attempt: int | None) -> list[Attempt]:
    """The attempts whose logs are wanted: each site's newest, or the one given. Raises BadInput where there is none."""
    found = by_site(book.attempts())
    if site is not None and site not in found:
        raise BadInput(f"launch {book.name} has no site {site}: it has {', '.join(found) or 'none yet'}")
    picked = []
    for name, attempts in found.items():
        if site in (None, name):
            picked += [attempts[-1]] if attempt is None else [each for each in attempts if each.number == attempt]
    if not picked:
        raise BadInput(f"launch {book.name} has no attempt {attempt}: see `composer-prime ps`")
    return picked


def merged_logs(fleet: Fleet, attempts: Sequence[Attempt], *, follow: bool) -> Iterator[str]:
    """Lines of several jobs as they come, each with its site's name before it; of one job as they are."""
    environment = list(os.environ.items())
    if len(attempts) == 1:
        yield from fleet.logs(attempts[0], follow=follow, environment=environment)
        return
    if not follow:
        for attempt in attempts:
            yield from (
                f"{attempt.site} | {line}" for line in fleet.logs(attempt, follow=False, environment=environment)
            )
        return
    lines: queue.Queue[str | None] = queue.Queue(maxsize=1000)

    def read(attempt: Attempt) -> None:
        try:
            for line in fleet.logs(attempt, follow=True, environment=environment):
                lines.put(f"{attempt.site} | {line}")
        except ComposerPrimeError as error:
            lines.put(f"{attempt.site} | (no more of its log: {error})")
        finally:
            lines.put(None)

    for attempt in attempts:
        threading.Thread(target=read, args=(attempt,), daemon=True).start()
    left = len(attempts)
    while left:
        line = lines.get()
        if line is None:
            left -= 1
        else:
            yield line
