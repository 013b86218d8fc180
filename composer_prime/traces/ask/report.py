"""What a run of asking did, cost and saved, from the folder's ledger and cache; and whether anything is left."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from composer_prime.traces.ask.folder import OpenFolder
from composer_prime.traces.ask.forecast import expected
from composer_prime.traces.ask.plan import Plan
from composer_prime.traces.ask.prices import usd
from composer_prime.traces.ask.questions import Question, key_of, sampling_id
from composer_prime.traces.ask.teacher import Teacher
from composer_prime.traces.states import TraceState


@dataclass(frozen=True)
class TeacherReport:
    """One teacher on these decision points.

    num_answered, num_unusable  of them, by this run and earlier ones; for usd in all
    num_failed                  questions that got no answer in this run
    num_waiting                 questions that didn't fit below the ceiling
    stopped                     why it is asked no more; None: it is
    """

    name: str
    num_answered: int
    num_unusable: int
    usd: float
    num_failed: int
    num_waiting: int
    stopped: str | None
    last_failure: str | None

    def lines(self) -> Iterator[str]:
        """As text."""
        line = f"{self.name}: {self.num_answered} answers, {self.num_unusable} unusable, ${self.usd:.6f}"
        if self.num_failed:
            line += f"; {self.num_failed} without an answer"
            line += f" (last: {self.last_failure})" if self.last_failure and not self.stopped else ""
        if self.num_waiting:
            line += f"; {self.num_waiting} don't fit below the ceiling: raise --ceiling-usd"
        yield line
        if self.stopped:
            yield f"{self.name} is asked no more: {self.stopped}"


@dataclass(frozen=True)
class Report:
    """All of a run.

    heading     the decision points
    num_skipped those where the student is sure, and does what the author did
    num_calls   requests sent in this run
    usd         settled for these decision points, in this run and earlier ones
    usd_run     settled in this run
    num_lost    calls in this folder of which nobody knows what they cost; usd_lost is reserved for them
    usd_spared  not spent in this run by choice: "gate" and "tiers", by the mean of each teacher's calls so far, and
                "cache", what answers cost that were there
    by_prices   teachers without a call so far, whose prices stand in for the mean
    """

    heading: str
    num_skipped: int
    num_calls: int
    usd: float
    usd_run: float
    num_lost: int
    usd_lost: float
    usd_spared: dict[str, float]
    by_prices: tuple[str, ...]
    teachers: tuple[TeacherReport, ...]

    @property
    def share_saved(self) -> float:
        """Of the dollars of this run, had nothing been left out by choice; 0 where that is free."""
        spared = sum(self.usd_spared.values())
        return spared / (spared + self.usd_run) if spared else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every question that was to be asked has an answer."""
        return not any(teacher.num_failed or teacher.num_waiting or teacher.stopped for teacher in self.teachers)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield self.heading + (f"; the student knows {self.num_skipped}" if self.num_skipped else "")
        for one in self.teachers:
            yield from one.lines()
        yield f"this run: {self.num_calls} calls, ${self.usd_run:.6f}; ${self.usd:.6f} for these points in all runs"
        if self.num_lost:
            yield f"{self.num_lost} calls were lost; up to ${self.usd_lost:.6f} stays reserved for them"
        if self.share_saved:
            kinds = {"gate": "by the student", "tiers": "in higher tiers", "cache": "for answers that were there"}
            parts = ", ".join(f"${self.usd_spared[kind]:.6f} {told}" for kind, told in kinds.items())
            by_prices = f" ({', '.join(self.by_prices)} by its prices)" if self.by_prices else ""
            yield f"{self.share_saved:.0%} saved: {parts}{by_prices}"


class Spared:
    """Questions that a run doesn't ask by choice."""

    def __init__(self, folder: OpenFolder) -> None:
        self.num_skipped = 0
        self._folder = folder
        self._count: Counter[tuple[str, Teacher]] = Counter()

    def note(self, kind: Literal["gate", "tiers"], state: TraceState, tiers: Iterable[Sequence[Teacher]]) -> None:
        """These teachers aren't asked at a decision point."""
        self.num_skipped += kind == "gate"
        for teacher in (teacher for tier in tiers for teacher in tier):
            self._count[kind, teacher] += self._folder.place(Question(state, teacher.config).key) is None

    def usd(self, plan: Plan, pool: Sequence[Teacher]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Dollars by kind, and the teachers of which only prices are known."""
        cost = Counter({"gate": 0, "tiers": 0, "cache": sum(teacher.cached_cost for teacher in pool)})
        unknown = set()
        for (kind, teacher), count in self._count.items():
            own = self._folder.ledger.totals.experience(teacher.config.name, teacher.config.model)
            mean = sum(expected(teacher.config, own, point) for point in plan.points.values()) // len(plan.points)
            cost[kind] += count * mean
            if count and not own.num_answers:
                unknown.add(teacher.config.name)
        return {kind: usd(amount) for kind, amount in cost.items()}, tuple(sorted(unknown))


def report(plan: Plan, pool: Sequence[Teacher], folder: OpenFolder, spared: Spared, settled_before: int) -> Report:
    """Read a run's result off its folder. `settled_before`: nano-dollars in the ledger when the run began."""
    totals, lost = folder.ledger.totals, folder.ledger.totals.lost
    teachers = tuple(_teacher_report(plan, teacher, folder) for teacher in pool)
    usd_spared, by_prices = spared.usd(plan, pool)
    return Report(
        heading=plan.heading(),
        num_skipped=spared.num_skipped,
        num_calls=folder.ledger.num_calls,
        usd=round(sum(teacher.usd for teacher in teachers), 9),
        usd_run=usd(totals.settled - settled_before),
        num_lost=len(lost),
        usd_lost=round(sum(record.usd_reserved for record in lost), 9),
        usd_spared=usd_spared,
        by_prices=by_prices,
        teachers=teachers,
    )


def _teacher_report(plan: Plan, teacher: Teacher, folder: OpenFolder) -> TeacherReport:
    sampling = sampling_id(teacher.config)
    found = [folder.place(key_of(sampling, question.hex())) for question in plan.points]
    kept = [one for one in found if one is not None]
    num_answered = sum(one.is_usable for one in kept)
    return TeacherReport(
        name=teacher.config.name,
        num_answered=num_answered,
        num_unusable=len(kept) - num_answered,
        usd=usd(sum(one.cost for one in kept)),
        num_failed=teacher.num_failed,
        num_waiting=teacher.num_waiting,
        stopped=teacher.stopped,
        last_failure=teacher.last_failure,
    )
