"""A launch's jobs as people see them: `ps`, and logs of several at once."""

import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain

from composer_prime.errors import BadInput, ComposerPrimeError
from composer_prime.launch.budget import ran_s, spent_usd
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.records import Attempt, LaunchBook, by_site
from composer_prime.visible import json_text, visible


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


def rows(attempts: Iterable[Attempt], now: float | None = None) -> list[Row]:
    """A launch's attempts, as a look gives them, for people."""
    found, now = [], time.time() if now is None else now
    for each in attempts:
        told, job = each.ended or each.status, each.job.id if each.job else ""
        code, message = (told.exit_code, told.message) if told else (None, "")
        spent = ran_s(each, now), spent_usd(each, now)
        found.append(Row(*each.place, each.record.on, each.state, code, *spent, job, each.problem or message))
    return found


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
    Console(width=None if sys.stdout.isatty() else 160).print(table, markup=False)


def chosen(book: LaunchBook, site: str | None, attempt: int | None) -> list[Attempt]:
    """The attempts whose logs are wanted: each site's newest, or the one given. Raises BadInput where there is none."""
    sites = by_site(book.attempts(site)).values()
    picked = [each for attempts in sites for each in attempts if each.number == (attempt or attempts[-1].number)]
    if not picked:
        raise BadInput(f"launch {book.name} has no attempt {attempt}: see `composer-prime ps`")
    return picked


def merged_logs(fleet: Fleet, attempts: Sequence[Attempt], *, follow: bool) -> Iterator[str]:
    """Lines of several jobs, each with its site's name before it, in turn or with `follow` as they come; of one job as
    they are."""

    def read(attempt: Attempt) -> Iterator[str]:
        lines = fleet.logs(attempt, follow=follow)
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
