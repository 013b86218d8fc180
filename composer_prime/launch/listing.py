"""A launch's jobs as people see them: `ps`, and logs of several at once."""

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain

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
    state: str
    exit_code: int | None
    seconds: float
    usd: float | None
    job: str
    message: str


def rows(book: LaunchBook, seen: Sequence[Seen], now: float | None = None) -> list[Row]:
    """What a look at a launch shows."""
    return [_row(book, each, time.time() if now is None else now) for each in seen]


def _row(book: LaunchBook, seen: Seen, now: float) -> Row:
    attempt, told = seen.attempt, seen.attempt.ended or seen.status
    (expense,) = expenses_of([attempt], {} if seen.status is None else {seen.place: seen.status})
    job = attempt.job(book.name)
    return Row(
        site=attempt.site,
        attempt=attempt.number,
        on=attempt.record.on,
        state=seen.state,
        exit_code=told.exit_code if told else None,
        seconds=expense.seconds(now),
        usd=expense.usd(now),
        job=job.id if job else "",
        message=seen.problem or (told.message if told else ""),
    )


def draw(found: Sequence[Row], book: LaunchBook, *, as_json: bool) -> None:
    """Print rows as a table, or as JSON lines."""
    if as_json:
        for row in found:
            print(json_text(asdict(row)))
        return
    from rich.console import Console
    from rich.table import Column, Table

    stop = book.stopped()
    title = f"launch {book.name}" + (f", stopped on {stop.by}" if stop else "")
    columns = [Column(each.name, overflow="fold") for each in fields(Row)]
    table = Table(*columns, title=title, title_justify="left")
    for row in found:
        code, usd = ("" if row.exit_code is None else row.exit_code), ("?" if row.usd is None else f"{row.usd:.2f}")
        shown = {**asdict(row), "exit_code": code, "seconds": f"{row.seconds:.0f}", "usd": usd}
        table.add_row(*map(visible, shown.values()))
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(table, markup=False)


def chosen(book: LaunchBook, site: str | None, attempt: int | None) -> list[Attempt]:
    """The attempts whose logs are wanted: each site's newest, or the one given. Raises BadInput where there is none."""
    found = by_site(book.attempts())
    if site is not None and site not in found:
        raise BadInput(f"launch {book.name} has no site {site}: it has {', '.join(found) or 'none yet'}")
    wanted = [each for name, attempts in found.items() if site in (None, name) for each in attempts]
    picked = [each for each in wanted if each.number == (attempt or found[each.site][-1].number)]
    if not picked:
        raise BadInput(f"launch {book.name} has no attempt {attempt}: see `composer-prime ps`")
    return picked


def merged_logs(fleet: Fleet, attempts: Sequence[Attempt], *, follow: bool) -> Iterator[str]:
    """Lines of several jobs, each with its site's name before it, in turn or with `follow` as they come; of one job as
    they are."""
    environment = list(os.environ.items())

    def read(attempt: Attempt) -> Iterator[str]:
        lines = fleet.logs(attempt, follow=follow, environment=environment)
        return lines if len(attempts) == 1 else (f"{attempt.site} | {line}" for line in lines)

    if len(attempts) == 1 or not follow:
        yield from chain.from_iterable(map(read, attempts))
        return
    lines: queue.Queue[str | None] = queue.Queue(maxsize=1000)

    def pump(attempt: Attempt) -> None:
        try:
            for line in read(attempt):
                lines.put(line)
        except ComposerPrimeError as error:
            lines.put(f"{attempt.site} | (no more of its log: {error})")
        finally:
            lines.put(None)

    for attempt in attempts:
        threading.Thread(target=pump, args=(attempt,), daemon=True).start()
    for _ in attempts:  # until so many have ended
        yield from iter(lines.get, None)
