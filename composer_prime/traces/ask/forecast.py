"""What asking will cost, before anything is sent: calls, dollars, minutes. Reads the folder, and changes nothing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.ledger import Record
from composer_prime.traces.ask.prices import at_prices, nano_usd, usd, worst_case
from composer_prime.traces.ask.questions import Question, Situation
from composer_prime.traces.states import TraceState, canonical, lacks_a_result

BYTES_PER_TOKEN = 4
"""Of English and code; an answer is taken to be as long as the author's."""

ASSUMED_LATENCY_S = 10.0
"""Of a call to a teacher that hasn't been asked yet."""


@dataclass(frozen=True)
class Amount:
    """Calls that are still to be sent, with what they cost and how long they take."""

    num_calls: int = 0
    predicted_usd: float = 0.0
    worst_usd: float = 0.0
    minutes: float = 0.0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            self.num_calls + other.num_calls,
            self.predicted_usd + other.predicted_usd,
            self.worst_usd + other.worst_usd,
            self.minutes + other.minutes,
        )


@dataclass(frozen=True)
class Forecast:
    """num_states: to be asked about. num_cut: more that are left out, since the log lacks a result that the author saw.
    least: only the lowest tier is asked. most: all are. spent_usd: settled in this folder so far, and lost."""

    num_states: int
    num_cut: int
    num_cached: int
    least: Amount
    most: Amount
    spent_usd: float

    def lines(self) -> Iterator[str]:
        """The forecast as text."""
        least, most = self.least, self.most
        yield f"{self.num_states} decision points{cut(self.num_cut)}; {self.num_cached} answers are there already"
        yield f"calls: {least.num_calls} to {most.num_calls}, as higher tiers are asked nowhere or everywhere"
        yield f"predicted: ${least.predicted_usd:.6f} to ${most.predicted_usd:.6f}; worst case: ${most.worst_usd:.6f}"
        yield f"minutes: {least.minutes:.1f} to {most.minutes:.1f}"
        yield f"this folder has ${self.spent_usd:.6f} settled or lost; nothing was sent"


class Experience:
    """What a teacher's calls cost and took so far, by the ledger."""

    def __init__(self, teacher: TextTeacher, records: Iterable[Record]) -> None:
        self._teacher = teacher
        own = [
            record
            for record in records
            if record.has_answer and (record.teacher, record.model_requested) == (teacher.name, teacher.model)
        ]
        self.num_answers = len(own)
        self._mean_cost = sum(nano_usd(record.usd_settled or 0) for record in own) // max(len(own), 1)
        self.latency_s = sum(record.latency_s or 0 for record in own) / len(own) if own else ASSUMED_LATENCY_S

    def cost(self, situation: Situation) -> int:
        """Nano-dollars to expect of one question: the mean so far, and for a teacher not asked yet what its prices
        make of the bytes."""
        if self.num_answers:
            return self._mean_cost
        prompt = len(Question(situation, self._teacher).body()) // BYTES_PER_TOKEN
        completion = len(canonical(situation.state.action)) // BYTES_PER_TOKEN
        return at_prices(self._teacher, prompt, 0, min(completion, self._teacher.max_tokens))


def distinct(states: Iterable[TraceState]) -> tuple[list[Situation], int]:
    """The situations of decision points, the same question once; and how many more have a call without a result.

    These aren't asked: the author saw what the log doesn't hold, and OpenAI's servers refuse such messages.
    """
    found = {situation.id: situation for situation in map(Situation, states)}.values()
    whole = [situation for situation in found if not lacks_a_result(situation.state.messages)]
    return whole, len(found) - len(whole)


def cut(count: int) -> str:
    """That so many decision points are left out, to follow the number of the others."""
    return f", {count} more left out: their log lacks a call's result" if count else ""


def forecast(states: Iterable[TraceState], teachers: Sequence[TextTeacher], folder: Path) -> Forecast:
    """What `ask` would send with this folder as it is. A student may spare some of it."""
    situations, num_cut = distinct(states)
    answers = AnswerFolder(folder)
    kept, records = answers.kept().keys(), answers.ledger()
    tiers: dict[int, Amount] = {}
    num_cached = 0
    for tier in sorted({teacher.tier for teacher in teachers}):
        amounts = []
        for teacher in teachers:
            if teacher.tier == tier:
                questions = [Question(situation, teacher) for situation in situations]
                open_ = [question for question in questions if question.key not in kept]
                num_cached += len(questions) - len(open_)
                amounts.append(_amount(teacher, open_, Experience(teacher, records)))
        together = sum(amounts, Amount())
        slowest = max(amount.minutes for amount in amounts)
        tiers[tier] = Amount(together.num_calls, together.predicted_usd, together.worst_usd, slowest)
    spent = sum(record.usd_reserved if record.usd_settled is None else record.usd_settled for record in records)
    return Forecast(len(situations), num_cut, num_cached, tiers[min(tiers)], sum(tiers.values(), Amount()), spent)


def _amount(teacher: TextTeacher, questions: Sequence[Question], experience: Experience) -> Amount:
    predicted = sum(experience.cost(question.situation) for question in questions)
    worst = sum(worst_case(teacher, len(question.body())) for question in questions)
    minutes = len(questions) * experience.latency_s / teacher.max_in_flight / 60
    return Amount(len(questions), usd(predicted), usd(worst), minutes)
