"""What asking will cost, before anything is sent, and what a run of it did and cost; each as lines of text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask.folder import AnswerFolder, OpenFolder
from composer_prime.traces.ask.ledger import Experience
from composer_prime.traces.ask.plan import BYTES_PER_TOKEN, Plan, Point
from composer_prime.traces.ask.prices import Usage, charge, usd, worst_case
from composer_prime.traces.ask.questions import frame_bytes
from composer_prime.traces.ask.teacher import Teacher, TeacherReport

ASSUMED_LATENCY_S = 10.0
"""Of a call to a teacher that hasn't been asked yet."""

BATCH_S = 86400.0
"""Of a batch, at most."""

QUORUM = 2
"""Usable answers that are the same action settle a decision point."""


class Amount(NamedTuple):
    """Calls that are still to be sent, with what they cost and how long they take."""

    num_calls: int = 0
    predicted_usd: float = 0.0
    worst_usd: float = 0.0
    minutes: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """least: only the lowest tiers are asked that have two teachers. most: all are. spent_usd: settled in this folder
    so far, and lost."""

    heading: str
    num_cached: int
    least: Amount
    most: Amount
    spent_usd: float

    def lines(self) -> Iterator[str]:
        least, most = self.least, self.most
        yield f"{self.heading}; {self.num_cached} answers are there already"
        yield f"calls: {least.num_calls} to {most.num_calls}, as higher tiers are asked nowhere or everywhere"
        yield f"predicted: ${least.predicted_usd:.6f} to ${most.predicted_usd:.6f}; worst case: ${most.worst_usd:.6f}"
        yield f"minutes: {least.minutes:.1f} to {most.minutes:.1f}"
        yield f"this folder has ${self.spent_usd:.6f} settled or lost; nothing was sent"


def forecast(plan: Plan, teachers: Sequence[TextTeacher], folder: Path) -> Forecast:
    """What `ask` would send with this folder as it is, which isn't changed."""
    tiers: list[Amount] = []
    num_cached = num_voters = num_first = 0
    with AnswerFolder(folder).copied() as answers:
        for tier in sorted({teacher.tier for teacher in teachers}):
            amounts = []
            for teacher in (teacher for teacher in teachers if teacher.tier == tier):
                left = plan.left(teacher, answers.kept)
                num_cached += len(plan.points) - len(left)
                amounts.append(_amount(teacher, left, answers.ledger.experience(teacher.name, teacher.model)))
            tiers.append(_sum(amounts)._replace(minutes=max(amount.minutes for amount in amounts)))
            num_first += num_voters < QUORUM
            num_voters += len(amounts)
        spent = usd(answers.ledger.committed)
    return Forecast(plan.heading(), num_cached, _sum(tiers[:num_first]), _sum(tiers), spent)


def _sum(amounts: Sequence[Amount]) -> Amount:
    return Amount(*map(sum, zip(*amounts, strict=True)))


def _amount(teacher: TextTeacher, points: Sequence[Point], experience: Experience) -> Amount:
    """The mean so far of each question; of a teacher without an answer, what its prices make of the sizes, where its
    answer is taken to be as long as the author's."""
    frame, latency_s = frame_bytes(teacher), ASSUMED_LATENCY_S
    worst = sum(worst_case(teacher, frame + point.num_bytes) for point in points)
    if experience.num_answers:
        predicted = len(points) * experience.cost // experience.num_answers
        latency_s = experience.latency_s / experience.num_answers
    else:
        answers = (min(point.action_bytes // BYTES_PER_TOKEN, teacher.longest_answer) for point in points)
        predicted = sum(charge(teacher, Usage(p.num_tokens, 0, 0, n)) for p, n in zip(points, answers, strict=True))
    rounds = len(points) / teacher.max_in_flight
    seconds = math.ceil(rounds) * BATCH_S if teacher.batch else rounds * latency_s
    return Amount(len(points), usd(predicted), usd(worst), seconds / 60)


@dataclass(frozen=True)
class Report:
    """All of a run.

    heading    the decision points
    num_calls  requests sent in this run
    usd        settled for these decision points, in this run and earlier ones
    usd_run    settled in this run
    num_lost   calls in this folder of which nobody knows what they cost; usd_lost is reserved for them
    """

    heading: str
    num_calls: int
    usd: float
    usd_run: float
    num_lost: int
    usd_lost: float
    teachers: tuple[TeacherReport, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every question that was to be asked has an answer."""
        return not any(teacher.num_failed or teacher.num_waiting or teacher.stopped for teacher in self.teachers)

    def lines(self) -> Iterator[str]:
        yield self.heading
        for one in self.teachers:
            yield from one.lines()
        yield f"this run: {self.num_calls} calls, ${self.usd_run:.6f}; ${self.usd:.6f} for these points in all runs"
        if self.num_lost:
            yield f"{self.num_lost} calls were lost; up to ${self.usd_lost:.6f} stays reserved for them"


def report(plan: Plan, pool: Sequence[Teacher], folder: OpenFolder, settled_before: int) -> Report:
    """Read a run's result off its folder. `settled_before`: nano-dollars in the ledger when the run began."""
    ledger, lost = folder.ledger, folder.ledger.lost()
    for teacher in pool:
        found = [folder.kept[key] for key in plan.by_key(teacher.config) if key in folder.kept]
        teacher.report.num_answered = sum(is_usable for _, is_usable in found)
        teacher.report.num_unusable = len(found) - teacher.report.num_answered
        teacher.report.usd = usd(sum(cost for cost, _ in found))
    teachers = tuple(teacher.report for teacher in pool)
    return Report(
        heading=plan.heading(),
        num_calls=ledger.num_calls,
        usd=round(sum(teacher.usd for teacher in teachers), 9),
        usd_run=usd(ledger.settled - settled_before),
        num_lost=len(lost),
        usd_lost=usd(sum(record.reserved_nano_usd for record in lost)),
        teachers=teachers,
    )
