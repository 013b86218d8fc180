"""What a run of asking did, cost and saved, from the folder's ledger and cache; and whether anything is left."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_prime.traces.ask.folder import OpenFolder
from composer_prime.traces.ask.forecast import Experience, cut
from composer_prime.traces.ask.prices import nano_usd, usd
from composer_prime.traces.ask.questions import Question, Situation
from composer_prime.traces.ask.teacher import Teacher


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


@dataclass(frozen=True)
class Report:
    """All of a run.

    num_states    distinct decision points, without those that were cut
    num_skipped   those where the student is sure, and does what the author did
    num_cut       those more that aren't asked about, since the log lacks a result that the author saw
    num_calls     requests sent in this run
    usd           settled for these decision points, in this run and earlier ones
    usd_run       settled in this run
    num_lost      calls in this folder of which nobody knows what they cost; usd_lost is reserved for them
    usd_everyone  what asking every teacher everywhere costs, by the mean of each one's calls so far
    unasked       teachers without a call so far, whose prices stand in for the mean
    """

    num_states: int
    num_skipped: int
    num_cut: int
    num_calls: int
    usd: float
    usd_run: float
    num_lost: int
    usd_lost: float
    usd_everyone: float
    unasked: tuple[str, ...]
    teachers: tuple[TeacherReport, ...]

    @property
    def share_saved(self) -> float:
        """Of the dollars that asking everyone everywhere costs; 0 where that is free."""
        return max(0.0, 1 - self.usd / self.usd_everyone) if self.usd_everyone else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every question that was to be asked has an answer."""
        return not any(teacher.num_failed or teacher.num_waiting or teacher.stopped for teacher in self.teachers)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        left_out = f", {self.num_skipped} left out: the student knows them" if self.num_skipped else ""
        yield f"{self.num_states} decision points{left_out}{cut(self.num_cut)}"
        for one in self.teachers:
            line = f"{one.name}: {one.num_answered} answers, {one.num_unusable} unusable, ${one.usd:.6f}"
            if one.num_failed:
                line += f"; {one.num_failed} without an answer"
                line += f" (last: {one.last_failure})" if one.last_failure else ""
            if one.num_waiting:
                line += f"; {one.num_waiting} don't fit below the ceiling: raise --ceiling-usd"
            yield line
            if one.stopped:
                yield f"{one.name} is asked no more: {one.stopped}"
        yield f"this run: {self.num_calls} calls, ${self.usd_run:.6f}"
        if self.num_lost:
            yield f"{self.num_lost} calls were lost; up to ${self.usd_lost:.6f} stays reserved for them"
        by_prices = f" ({', '.join(self.unasked)} by its prices)" if self.unasked else ""
        yield (
            f"${self.usd:.6f} for these decision points; asking everyone everywhere costs "
            f"${self.usd_everyone:.6f}{by_prices}: {self.share_saved:.0%} saved"
        )


def report(
    situations: Sequence[Situation],
    pool: Sequence[Teacher],
    folder: OpenFolder,
    num_before: int,
    num_skipped: int,
    num_cut: int,
) -> Report:
    """Read a run's result off its folder.

    num_before   calls in the ledger when the run began.
    num_skipped  decision points that the gate left out.
    num_cut      those more whose log lacks a result.
    """
    records = folder.ledger.records
    lost = [record for record in records if record.outcome == "lost"]
    experiences = [Experience(teacher.config, records) for teacher in pool]
    everyone = sum(one.cost(situation) for one in experiences for situation in situations)
    teachers = tuple(_teacher_report(situations, teacher, folder) for teacher in pool)
    return Report(
        num_states=len(situations),
        num_skipped=num_skipped,
        num_cut=num_cut,
        num_calls=len(records) - num_before,
        usd=usd(sum(nano_usd(teacher.usd) for teacher in teachers)),
        usd_run=usd(sum(nano_usd(record.usd_settled or 0) for record in records[num_before:])),
        num_lost=len(lost),
        usd_lost=usd(sum(nano_usd(record.usd_reserved) for record in lost)),
        usd_everyone=usd(everyone),
        unasked=tuple(
            teacher.config.name for teacher, one in zip(pool, experiences, strict=True) if not one.num_answers
        ),
        teachers=teachers,
    )


def _teacher_report(situations: Sequence[Situation], teacher: Teacher, folder: OpenFolder) -> TeacherReport:
    found = [folder.find(Question(situation, teacher.config)) for situation in situations]
    kept = [one for one in found if one is not None]
    num_answered = sum(one.action is not None for one in kept)
    return TeacherReport(
        name=teacher.config.name,
        num_answered=num_answered,
        num_unusable=len(kept) - num_answered,
        usd=usd(sum(nano_usd(one.record.usd_settled or 0) for one in kept)),
        num_failed=teacher.num_failed,
        num_waiting=teacher.num_waiting,
        stopped=teacher.stopped,
        last_failure=teacher.last_failure,
    )
