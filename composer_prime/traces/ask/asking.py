"""Puts decision points to text teachers, cheap ones first, under a ceiling of dollars; resumable at any moment.

student   sure, and does what the author did: nobody is asked
tier 0    is asked first
tier n    is asked where no two usable answers of the tiers below are the same action
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from composer_prime.bearer import is_local
from composer_prime.config.teachers import check_url
from composer_prime.config.text_teachers import TextTeacher
from composer_prime.errors import BadInput, ComposerPrimeError
from composer_prime.traces.ask.folder import AnswerFolder, OpenFolder
from composer_prime.traces.ask.gate import Student
from composer_prime.traces.ask.plan import Plan
from composer_prime.traces.ask.prices import NANO, usd, worst_case
from composer_prime.traces.ask.questions import Question, Wording, frame_bytes, key_of, sampling_id
from composer_prime.traces.ask.report import Report, Spared, report
from composer_prime.traces.ask.teacher import Teacher
from composer_prime.traces.pairs.actions import same_action
from composer_prime.traces.states import Message, States, Tool, TraceState

SameAction: TypeAlias = Callable[[Message, Message, Sequence[Tool], str | None], bool]
"""Whether two assistant messages are the same action, given the tools and `TraceState.cwd`; an equivalence."""


@dataclass(frozen=True)
class Gate:
    """Nobody is asked where the student's mean entropy is below `min_entropy` nats and it does what the author did."""

    student_url: str
    min_entropy: float


Agree: TypeAlias = Callable[[Sequence[str], str], bool]
"""Whether questions may go to these hosts of others, given the request of one."""


async def ask(
    store: States,
    plan: Plan,
    teachers: Sequence[TextTeacher],
    folder: Path,
    ceiling_usd: float,
    *,
    gate: Gate | None = None,
    same_action: SameAction = same_action,
    progress: Callable[[int, float], None] = lambda num_done, committed_usd: None,
    agree: Agree = lambda hosts, request: True,
) -> Report:
    """Ask, and leave answers and ledger in `folder`, which an earlier run may have begun.

    plan         of the store: which decision points.
    ceiling_usd  of the folder: what is settled and reserved there, by all runs, never exceeds it together.
    progress     called when the first is asked, and after each decision point, with how many are done, and the dollars
                 that are settled or reserved in the folder.
    agree        called before anything is sent to a server on another machine, once for a folder and server.

    Raises BadInput, before anything is sent: no teachers, a key that isn't set, a folder that another process holds, a
    student that isn't there, no agreement, or a ceiling below one call. TeacherError when the student fails on the way.
    """
    if not teachers:
        raise BadInput(f"there are {len(plan.points)} decision points and 0 teachers: give one at least")
    if not 0 < ceiling_usd < 10**6:
        raise BadInput(f"--ceiling-usd ({ceiling_usd:g}) must be dollars above 0 and below a million")
    async with AsyncExitStack() as stack:
        answers, wording = AnswerFolder(folder), Wording()
        opened = stack.enter_context(answers.held(teachers, math.floor(ceiling_usd * NANO)))
        settled_before = opened.ledger.totals.settled
        pool = []
        for teacher in teachers:
            pool.append(Teacher(teacher, opened, wording))
            stack.push_async_callback(pool[-1].close)
        for teacher in pool:
            await teacher.settle_lost()
        _check_ceiling(plan, pool, opened, ceiling_usd)
        hosts = [*(teacher.base_url for teacher in teachers), *([gate.student_url] if gate else [])]
        hosts = sorted({urlsplit(url).netloc for url in hosts if not is_local(url)})
        if not answers.has_agreed(hosts):
            request = Question(next(plan.states(store)), teachers[0]).body(wording)
            if not agree(hosts, request.decode()):
                raise BadInput(f"nothing was sent, since it may not go to {', '.join(hosts)}")
            answers.agree(hosts)
        asking = _Asking(pool, opened, same_action, gate)
        await asking.open(stack, wording)
        await asking.run(plan.states(store), lambda done: progress(done, usd(opened.ledger.committed)))
        for teacher in pool:
            await teacher.settle_lost()
        return report(plan, pool, opened, asking.spared, settled_before)


class _Asking:
    """One run over all decision points."""

    def __init__(self, pool: Sequence[Teacher], folder: OpenFolder, same_action: SameAction, gate: Gate | None) -> None:
        self.spared = Spared(folder)
        numbers = sorted({teacher.config.tier for teacher in pool})
        self._tiers = [[teacher for teacher in pool if teacher.config.tier == number] for number in numbers]
        self._num_workers = sum(teacher.config.max_in_flight for teacher in pool)
        self._same_action = same_action
        self._gate = gate
        self._student: Student | None = None

    async def open(self, stack: AsyncExitStack, wording: Wording) -> None:
        """Find the student, if there is a gate."""
        if self._gate is None:
            return
        try:
            self._student = Student(check_url(self._gate.student_url), wording)
        except ValueError as error:
            raise BadInput(f"--student: {error}") from None
        stack.push_async_callback(self._student.close)
        await self._student.find()

    async def run(self, waiting: Iterator[TraceState], done: Callable[[int], None]) -> None:
        """Settle all of them, begun in their order, many at once."""
        num_done = 0

        async def work() -> None:
            nonlocal num_done
            for state in waiting:
                try:
                    await self._settle(state)
                except ComposerPrimeError:
                    deque(waiting, maxlen=0)  # nobody begins another; what is in flight, and paid, comes home
                    raise
                num_done += 1
                done(num_done)

        done(0)
        for ended in await asyncio.gather(*(work() for _ in range(self._num_workers)), return_exceptions=True):
            if ended is not None:
                raise ended

    async def _settle(self, state: TraceState) -> None:
        if await self._is_known(state):
            self.spared.note("gate", state, self._tiers)
            return
        actions: list[Message] = []
        for place, tier in enumerate(self._tiers):
            found = await asyncio.gather(*(teacher.ask(Question(state, teacher.config)) for teacher in tier))
            actions += [kept.action for kept in found if kept is not None and kept.action is not None]
            if any(self._same_action(*two, state.tools, state.cwd) for two in combinations(actions, 2)):
                self.spared.note("tiers", state, self._tiers[place + 1 :])
                return

    async def _is_known(self, state: TraceState) -> bool:
        if self._student is None or self._gate is None:
            return False
        reading = await self._student.read(state)
        if reading is None or reading.action is None or reading.entropy >= self._gate.min_entropy:
            return False
        return self._same_action(reading.action, state.action, state.tools, state.cwd)


def _check_ceiling(plan: Plan, pool: Sequence[Teacher], opened: OpenFolder, ceiling_usd: float) -> None:
    """Raise BadInput when no call that is still to be sent first fits below the ceiling."""
    first = min(teacher.config.tier for teacher in pool)
    least = None
    for config in (teacher.config for teacher in pool if teacher.config.tier == first):
        sampling, frame = sampling_id(config), frame_bytes(config)
        for question, point in plan.points.items():
            if opened.place(key_of(sampling, question.hex())) is None:
                needed = opened.ledger.needed(worst_case(config, frame + point.num_bytes))
                if needed <= ceiling_usd * NANO:
                    return
                least = needed if least is None else min(least, needed)
    if least is not None:
        spent = usd(opened.ledger.committed)
        raise BadInput(
            f"--ceiling-usd ({ceiling_usd:g}) is below one call, with ${spent:g} settled or reserved in this folder: "
            f"give at least {math.ceil(least / 1000) / 10**6:.6f}"
        )
