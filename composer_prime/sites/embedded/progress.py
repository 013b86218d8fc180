"""What a person sees while sites run: their metrics tapes, followed while they grow, in one line or row a site.

Reads files only, and only what is new: it can run beside the site or after it, and costs next to nothing. A screen is
redrawn in place on a terminal, and printed now and then into a log file.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from composer_prime import metrics
from composer_prime.config.paths import SitePaths
from composer_prime.visible import shown
from composer_prime.waiting import Waiting, read_waiting

RECENT = 3
"""Records that a rate or a shown reward is the mean of: a step's reward alone is too noisy to read."""

REDRAW_S = 0.5
"""Seconds between two drawings on a terminal."""
LINE_S = 5.0
"""Seconds between two lines a site where there is no terminal."""
MUCH_FAILED = 0.5
"""Share of failed rollouts above which they are told."""

WAITING = "waiting"
STYLES = {"running": "cyan", WAITING: "yellow", "done": "green", "stopped": "yellow", "failed": "bold red"}


@dataclass(frozen=True)
class SiteNumbers:
    """One line of what a person watches; a number that isn't known yet is NaN."""

    step: int = 0
    """Training steps done."""
    reward: float = math.nan
    """Mean over the last RECENT steps."""
    rollouts_per_s: float = math.nan
    tokens_per_s: float = math.nan
    """Tokens trained on a second, waiting included."""
    rounds: int = 0
    """Outer rounds merged, over all fragments."""
    waiting: Waiting | None = None
    stall: float = math.nan
    """Share of the wall time of its training, waiting included, in which it was stalled on the outer loop."""
    failed: float = math.nan
    """Share of the rollouts of the last RECENT steps that failed."""


class SiteProgress:
    """What one site's tapes hold so far; a step trained again after a resume counts once, as it went last.

    series       values by metric and step
    num_trained  steps trained, each time again that one was
    """

    def __init__(self, paths: SitePaths) -> None:
        self.series: dict[str, dict[int, float]] = defaultdict(dict)
        self.num_trained = 0
        self._waiting = [paths.waiting(role) for role in ("trainer", "orchestrator")]
        self._tapes = [metrics.TapeFollower(paths.tape(role)) for role in ("orchestrator", "trainer")]

    def update(self) -> SiteNumbers:
        """Read what is new and give the line as of now."""
        for record in [record for tape in self._tapes for record in tape.new_records()]:
            self.num_trained += metrics.TRAIN_TOKENS in record
            for name, value in record.items():
                if not math.isnan(value):  # no rollout went through: no value
                    self.series[name][int(record["step"])] = value
        waiting = next(filter(None, map(read_waiting, self._waiting)), None)
        return replace(self.numbers(), waiting=waiting)

    def trained_rewards(self) -> dict[int, float]:
        """Reward by step, of the steps that were trained on: at the end rollouts have run ahead of the trainer."""
        rewards = self.series[metrics.ROLLOUT_REWARD]
        return {step: rewards[step] for step in sorted(rewards) if step in self.series[metrics.TRAIN_TOKENS]}

    def tool_error_shares(self) -> dict[int, float]:
        """By step the share of tool calls that failed; steps without a call are left out, so are those not trained."""
        calls, errors = self.series[metrics.TOOLS_CALLS], self.series[metrics.TOOLS_ERRORS]
        steps = [step for step in sorted(calls) if step in self.series[metrics.TRAIN_TOKENS] and calls[step]]
        return {step: errors.get(step, 0.0) / calls[step] for step in steps}

    def teacher_weights(self) -> dict[str, dict[int, float]]:
        """By teacher and step, in order, the share of its turns at which it is heard."""
        named = {name.split("/", 1)[1]: values for name, values in self.series.items() if name.startswith("teacher/")}
        return {
            name.removesuffix("/weight"): dict(sorted(values.items()))
            for name, values in named.items()
            if name.endswith("/weight")
        }

    def total(self, name: str) -> float:
        """The sum of a metric over all steps."""
        return sum(self.series[name].values())

    def recent(self, name: str) -> list[float]:
        """A metric's values at the last RECENT steps that have one."""
        values = self.series[name]
        return [values[step] for step in sorted(values)[-RECENT:]]

    def numbers(self) -> SiteNumbers:
        """The line as of the newest record."""
        num_failed = sum(self.recent(metrics.ROLLOUT_FAILED))
        return SiteNumbers(
            step=len(self.series[metrics.TRAIN_TOKENS]),
            reward=mean(self.recent(metrics.ROLLOUT_REWARD)),
            rollouts_per_s=mean(self.recent(metrics.ROLLOUT_PER_S)),
            tokens_per_s=ratio(sum(self.recent(metrics.TRAIN_TOKENS)), sum(self.recent(metrics.TRAIN_STEP_S))),
            rounds=int(max(self.series[metrics.OUTER_ROUND].values(), default=0)),
            stall=ratio(self.total(metrics.OUTER_STALL_S), self.total(metrics.TRAIN_STEP_S)),
            failed=ratio(num_failed, num_failed + sum(self.recent(metrics.ROLLOUT_COUNT))),
        )


def mean(values: list[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def ratio(part: float, whole: float) -> float:
    """part / whole; NaN when the whole is nothing."""
    return part / whole if whole else math.nan


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


def cells(numbers: SiteNumbers, max_steps: int) -> dict[str, str]:
    """A site's numbers as people read them, by title."""
    return {
        "step": f"{numbers.step}/{max_steps}",
        "reward": show(numbers.reward, ".3f"),
        "rollouts/s": show(numbers.rollouts_per_s, ".0f"),
        "tokens/s": show(numbers.tokens_per_s, ".0f"),
        "fragment rounds": str(numbers.rounds),
        "stall": f"{show(100 * numbers.stall, '.1f')} %",
    }


def draw_line(site: str, state: str, numbers: SiteNumbers, max_steps: int) -> str:
    """One site as key=value, for a log file."""
    told = {"site": site, "state": state, **cells(numbers, max_steps)}
    if numbers.failed > MUCH_FAILED:
        told["failed"] = f"{numbers.failed:.0%}"
    line = " ".join(f"{title.replace(' ', '_')}={value.replace(' ', '')}" for title, value in told.items())
    return f'{line} waits="{numbers.waiting}"' if state == WAITING else line


def draw_table(sites: Mapping[str, tuple[str, SiteNumbers]], max_steps: int) -> Table:
    """All sites as a table with a bar each."""
    step, *rest = cells(SiteNumbers(), max_steps)
    table = Table("site", "state", step, "", expand=False)
    for title in rest:
        table.add_column(title, justify="right", min_width=6)
    notes = []
    for site, (state, numbers) in sites.items():
        step, *rest = cells(numbers, max_steps).values()
        bar = ProgressBar(total=max_steps, completed=numbers.step, width=16)
        table.add_row(site, Text(state, style=STYLES.get(state, "")), step, bar, *rest)
        if state == WAITING:
            notes.append(f"{site} waits {numbers.waiting}")
        if numbers.failed > MUCH_FAILED:
            notes.append(f"{site}: {numbers.failed:.0%} of its rollouts fail, see its logs/orchestrator.log")
    table.caption = Text(shown("\n".join(notes), lines=True)) if notes else None
    return table


def show(value: float | None, form: str) -> str:
    """A number in that format; a dash where there is none yet."""
    return "-" if value is None or math.isnan(value) else format(value, form)
