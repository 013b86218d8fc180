"""What asking will cost, before anything is sent: calls, dollars, minutes. Reads the folder, and changes nothing."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.ledger import Experience
from composer_prime.traces.ask.plan import BYTES_PER_TOKEN, Plan, Point
from composer_prime.traces.ask.prices import Usage, charge, usd, worst_case
from composer_prime.traces.ask.questions import frame_bytes, key_of, sampling_id

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

    def __add__(self, other: "Amount") -> "Amount":  # type: ignore[override]
        return Amount(self[0] + other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3])


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
        """The forecast as text."""
        least, most = self.least, self.most
        yield f"{self.heading}; {self.num_cached} answers are there already"
        yield f"calls: {least.num_calls} to {most.num_calls}, as higher tiers are asked nowhere or everywhere"
        yield f"predicted: ${least.predicted_usd:.6f} to ${most.predicted_usd:.6f}; worst case: ${most.worst_usd:.6f}"
        yield f"minutes: {least.minutes:.1f} to {most.minutes:.1f}"
        yield f"this folder has ${self.spent_usd:.6f} settled or lost; nothing was sent"


def expected(teacher: TextTeacher, experience: Experience, point: Point) -> int:
    """Nano-dollars to expect of one question: the mean so far; of a teacher without an answer, what its prices make of
    the sizes. Its answer is taken to be as long as the author's."""
    if experience.num_answers:
        return experience.cost // experience.num_answers
    completion = min(point.action_bytes // BYTES_PER_TOKEN, teacher.longest_answer)
    return charge(teacher, Usage(point.num_tokens, 0, 0, completion))


def forecast(plan: Plan, teachers: Sequence[TextTeacher], folder: Path) -> Forecast:
    """What `ask` would send with this folder as it is. A student may spare some of it."""
    answers = AnswerFolder(folder)
    kept, totals = answers.places(), answers.totals()
    tiers: list[Amount] = []
    num_cached = num_voters = 0
    least = Amount()
    for tier in sorted({teacher.tier for teacher in teachers}):
        amounts = []
        for teacher in (teacher for teacher in teachers if teacher.tier == tier):
            sampling = sampling_id(teacher)
            points = [point for question, point in plan.points.items() if key_of(sampling, question.hex()) not in kept]
            num_cached += len(plan.points) - len(points)
            amounts.append(_amount(teacher, points, totals.experience(teacher.name, teacher.model)))
        together = sum(amounts, Amount())
        slowest = max(amount.minutes for amount in amounts)
        tiers.append(Amount(together.num_calls, together.predicted_usd, together.worst_usd, slowest))
        if num_voters < QUORUM:
            least += tiers[-1]
        num_voters += len(amounts)
    return Forecast(plan.heading(), num_cached, least, sum(tiers, Amount()), usd(totals.settled + totals.unsettled))


def _amount(teacher: TextTeacher, points: Sequence[Point], experience: Experience) -> Amount:
    predicted = sum(expected(teacher, experience, point) for point in points)
    frame = frame_bytes(teacher)
    worst = sum(worst_case(teacher, frame + point.num_bytes) for point in points)
    latency_s = experience.latency_s / experience.num_answers if experience.num_answers else ASSUMED_LATENCY_S
    rounds = len(points) / teacher.max_in_flight
    seconds = math.ceil(rounds) * BATCH_S if teacher.batch else rounds * latency_s
    return Amount(len(points), usd(predicted), usd(worst), seconds / 60)
