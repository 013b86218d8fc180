"""What a person sees while sites run: one line a site, redrawn in place, or printed now and then into a log file.

Decides how numbers look and nothing else; where they come from is progress.py's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from composer_prime.sites.embedded.progress import SiteNumbers
from composer_prime.visible import shown

REDRAW_S = 0.5
"""Seconds between two drawings on a terminal."""
LINE_S = 5.0
"""Seconds between two lines a site where there is no terminal."""
MUCH_FAILED = 0.5
"""Share of failed rollouts above which they are told."""

WAITING = "waiting"
STYLES = {"running": "cyan", WAITING: "yellow", "done": "green", "stopped": "yellow", "failed": "bold red"}


class Screen:
    """Draws on `console` from inside a `with`; `update` as often as you like, it looks only when a drawing is due.

    max_steps  training steps of a site, for the bars.
    look       gives the state and the numbers of each site by name.
    """

    def __init__(
        self, console: Console, max_steps: int, look: Callable[[], Mapping[str, tuple[str, SiteNumbers]]]
    ) -> None:
        self._console = console
        self._max_steps = max_steps
        self._look = look
        # Drawn from the one thread we have: children are tied to the thread that started them, and a second thread
        # would make starting one again unsafe.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._period_s = REDRAW_S if self._live else LINE_S
        self._due = time.monotonic()

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._draw()
        if self._live:
            self._live.stop()

    def update(self) -> None:
        """Draw what there is now, when it is time to."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._period_s
            self._draw()

    def say(self, message: str) -> None:
        """Print a line above the drawing; it stays."""
        self._console.print(Text(shown(message, lines=True)), soft_wrap=True)

    def _draw(self) -> None:
        sites = self._look()
        if self._live:
            self._live.update(draw_table(sites, self._max_steps), refresh=True)
            return
        for site, (state, numbers) in sites.items():
            self.say(draw_line(site, state, numbers, self._max_steps))


def draw_line(site: str, state: str, numbers: SiteNumbers, max_steps: int) -> str:
    """One site as key=value, for a log file."""
    return (
        f"site={site} state={state} step={numbers.step}/{max_steps} reward={show(numbers.reward, '.3f')} "
        f"rollouts/s={show(numbers.rollouts_per_s, '.0f')} tokens/s={show(numbers.tokens_per_s, '.0f')} "
        f"fragment_rounds={numbers.rounds} stall={show(100 * numbers.stall, '.1f')}%"
        + (f" failed={show(100 * numbers.failed, '.0f')}%" if numbers.failed > MUCH_FAILED else "")
        + (f' waits="{numbers.waiting}"' if state == WAITING else "")
    )


def draw_table(sites: Mapping[str, tuple[str, SiteNumbers]], max_steps: int) -> Table:
    """All sites as a table with a bar each."""
    table = Table(expand=False)
    for title in ("site", "state", "step"):
        table.add_column(title)
    table.add_column("", width=16)
    for title in ("reward", "rollouts/s", "tokens/s", "fragment rounds", "stall"):
        table.add_column(title, justify="right", min_width=6)
    for site, (state, numbers) in sites.items():
        table.add_row(
            site,
            Text(state, style=STYLES.get(state, "")),
            f"{numbers.step}/{max_steps}",
            ProgressBar(total=max_steps, completed=numbers.step, width=16),
            show(numbers.reward, ".3f"),
            show(numbers.rollouts_per_s, ".0f"),
            show(numbers.tokens_per_s, ".0f"),
            str(numbers.rounds),
            f"{show(100 * numbers.stall, '.1f')} %",
        )
    notes = [f"{site} waits {numbers.waiting}" for site, (state, numbers) in sites.items() if state == WAITING]
    for site, (_, numbers) in sites.items():
        if numbers.failed > MUCH_FAILED:
            notes.append(f"{site}: {numbers.failed:.0%} of its rollouts fail, see its logs/orchestrator.log")
    table.caption = Text(shown("\n".join(notes), lines=True)) if notes else None
    return table


def show(value: float, form: str) -> str:
    """A number in that format; a dash where there is none yet."""
    return "-" if math.isnan(value) else format(value, form)
