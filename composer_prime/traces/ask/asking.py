"""Puts decision points to text teachers, cheap ones first, under a ceiling of dollars; resumable at any moment.

student   sure, and does what the author did: nobody is asked
tier 0    is asked first
tier n    is asked where the answers of the tier below differ, or none is usable
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from composer_prime.config.teachers import check_url
from composer_prime.config.text_teachers import TextTeacher
from composer_prime.errors import BadInput, ComposerPrimeError
from composer_prime.traces.ask.folder import AnswerFolder, OpenFolder
from composer_prime.traces.ask.forecast import distinct
from composer_prime.traces.ask.gate import Student
from composer_prime.traces.ask.prices import NANO, usd, worst_case
from composer_prime.traces.ask.questions import Question, Situation
from composer_prime.traces.ask.report import Report, report
from composer_prime.traces.ask.teacher import Teacher
from composer_prime.traces.pairs.actions import same_action
from composer_prime.traces.states import Message, Tool, TraceState

SameAction: TypeAlias = Callable[[Message, Message, Sequence[Tool], str | None], bool]
"""Whether two assistant messages are the same action, given the tools and `TraceState.cwd`; an equivalence."""


@dataclass(frozen=True)
class Progress:
    """Decision points that are done, and dollars that are settled or reserved in the folder."""

    num_done: int
    num_states: int
    committed_usd: float


@dataclass(frozen=True)
class Gate:
    """Nobody is asked where the student's mean entropy is below `min_entropy` nats and it does what the author did."""

    student_url: str
    min_entropy: float


async def ask(
    states: Iterable[TraceState],
    teachers: Sequence[TextTeacher],
    folder: Path,
    ceiling_usd: float,
    *,
    gate: Gate | None = None,
    same_action: SameAction = same_action,
    progress: Callable[[Progress], None] = lambda now: None,
) -> Report:
    """Ask, and leave answers and ledger in `folder`, which an earlier run may have begun.

    ceiling_usd  of the folder: what is settled and reserved there, by all runs, never exceeds it together.
    progress     called when the first is asked, and after each decision point.

    Raises BadInput, before anything is sent: no decision points, no teachers, a key that isn't set, a folder that
    another process holds, a student that isn't there, or a ceiling below one call. TeacherError when the student fails
    on the way.
    """
    situations, num_cut = distinct(states)
    if not situations or not teachers:
        raise BadInput(f"there are {len(situations)} decision points and {len(teachers)} teachers: give one at least")
    if not 0 < ceiling_usd < 10**6:
        raise BadInput(f"--ceiling-usd ({ceiling_usd:g}) must be dollars above 0 and below a million")
    async with AsyncExitStack() as stack:
        opened = stack.enter_context(AnswerFolder(folder).held(teachers, math.floor(ceiling_usd * NANO)))
        num_before = len(opened.ledger.records)
        pool = []
        for teacher in teachers:
            pool.append(Teacher(teacher, opened))
            stack.push_async_callback(pool[-1].close)
        _check_ceiling(situations, pool, opened, ceiling_usd)
        asking = _Asking(pool, same_action, gate)
        await asking.open(stack)
        await asking.run(
            situations, lambda done: progress(Progress(done, len(situations), usd(opened.ledger.committed)))
        )
        return report(situations, pool, opened, num_before, asking.num_skipped, num_cut)


class _Asking:
    """One run over all decision points."""

    def __init__(self, pool: Sequence[Teacher], same_action: SameAction, gate: Gate | None) -> None:
        self.num_skipped = 0
        numbers = sorted({teacher.config.tier for teacher in pool})
        self._tiers = [[teacher for teacher in pool if teacher.config.tier == number] for number in numbers]
        self._num_workers = sum(teacher.config.max_in_flight for teacher in pool)
        self._same_action = same_action
        self._gate = gate
        self._student: Student | None = None

    async def open(self, stack: AsyncExitStack) -> None:
        """Find the student, if there is a gate."""
        if self._gate is None:
            return
        try:
            self._student = Student(check_url(self._gate.student_url))
        except ValueError as error:
            raise BadInput(f"--student: {error}") from None
        stack.push_async_callback(self._student.close)
        await self._student.find()

    async def run(self, situations: Sequence[Situation], done: Callable[[int], None]) -> None:
        """Settle all of them, begun in their order, many at once."""
        waiting, num_done = iter(situations), 0

        async def work() -> None:
            nonlocal num_done
            for situation in waiting:
                try:
                    await self._settle(situation)
                except ComposerPrimeError:
                    deque(waiting, maxlen=0)  # nobody begins another; what is in flight, and paid, comes home
                    raise
                num_done += 1
                done(num_done)

        done(0)
        for ended in await asyncio.gather(*(work() for _ in range(self._num_workers)), return_exceptions=True):
            if ended is not None:
                raise ended

    async def _settle(self, situation: Situation) -> None:
        if await self._is_known(situation):
            self.num_skipped += 1
            return
        for tier in self._tiers:
            found = await asyncio.gather(*(teacher.ask(Question(situation, teacher.config)) for teacher in tier))
            actions = [kept.action for kept in found if kept is not None and kept.action is not None]
            given = situation.state.tools, situation.state.cwd
            if actions and all(self._same_action(actions[0], other, *given) for other in actions[1:]):
                return

    async def _is_known(self, situation: Situation) -> bool:
        if self._student is None or self._gate is None:
            return False
        reading = await self._student.read(situation)
        if reading is None or reading.action is None or reading.entropy >= self._gate.min_entropy:
            return False
        state = situation.state
        return self._same_action(reading.action, state.action, state.tools, state.cwd)


def _check_ceiling(
    situations: Sequence[Situation], pool: Sequence[Teacher], opened: OpenFolder, ceiling_usd: float
) -> None:
    """Raise BadInput when no call that is still to be sent first fits below the ceiling."""
    first = min(teacher.config.tier for teacher in pool)
    least = None
    for teacher in pool:
        for situation in situations if teacher.config.tier == first else ():
            question = Question(situation, teacher.config)
            if opened.find(question) is None:
                needed = opened.ledger.needed(worst_case(teacher.config, len(question.body())))
                if needed <= ceiling_usd * NANO:
                    return
                least = needed if least is None else min(least, needed)
    if least is not None:
        spent = usd(opened.ledger.committed)
        raise BadInput(
            f"--ceiling-usd ({ceiling_usd:g}) is below one call, with ${spent:g} settled or reserved in this folder: "
            f"give at least {math.ceil(least / 1000) / 10**6:.6f}"
        )
