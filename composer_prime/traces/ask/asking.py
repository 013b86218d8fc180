"""Puts decision points to text teachers, cheap ones first, under a ceiling of dollars; resumable at any moment.

tier 0  is asked first
tier n  is asked where no two usable answers of the tiers below are the same action
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

from composer_prime.bearer import is_local
from composer_prime.config.text_teachers import TextTeacher
from composer_prime.errors import BadInput, ComposerPrimeError
from composer_prime.traces.ask.folder import AnswerFolder, OpenFolder
from composer_prime.traces.ask.plan import Plan
from composer_prime.traces.ask.prices import NANO, usd, worst_case
from composer_prime.traces.ask.questions import Wording, frame_bytes
from composer_prime.traces.ask.report import Report, report
from composer_prime.traces.ask.teacher import Teacher
from composer_prime.traces.pairs.actions import same_action
from composer_prime.traces.states import Message, States, TraceState


async def ask(
    store: States,
    plan: Plan,
    teachers: Sequence[TextTeacher],
    folder: Path,
    ceiling_usd: float,
    *,
    progress: Callable[[int, float], None] = lambda num_done, committed_usd: None,
    agree: Callable[[Sequence[str], str], bool] = lambda hosts, request: True,
) -> Report:
    """Ask, and leave answers and ledger in `folder`, which an earlier run may have begun.

    plan         of the store: which decision points.
    ceiling_usd  of the folder: what is settled and reserved there, by all runs, never exceeds it together.
    progress     called when the first is asked, and after each decision point, with how many are done, and the dollars
                 that are settled or reserved in the folder.
    agree        called with hosts of others and one question's request before anything is sent to them, once for a
                 folder and server: whether it may.

    Raises BadInput, before anything is sent: no teachers, a key that isn't set, a folder that another process holds or
    that is damaged, no agreement, or a ceiling below one call. SystemRefused where the system takes no more.
    """
    if not teachers:
        raise BadInput(f"there are {len(plan.points)} decision points and 0 teachers: give one at least")
    if not 0 < ceiling_usd < 10**6:
        raise BadInput(f"--ceiling-usd ({ceiling_usd:g}) must be dollars above 0 and below a million")
    async with AsyncExitStack() as stack:
        opened = stack.enter_context(AnswerFolder(folder).held(teachers, math.floor(ceiling_usd * NANO)))
        settled_before, wording = opened.ledger.settled, Wording()
        pool = []
        for teacher in teachers:
            pool.append(Teacher(teacher, opened, wording))
            stack.push_async_callback(pool[-1].close)
        for teacher in pool:
            await teacher.settle_lost()
        _check_ceiling(plan, teachers, opened, ceiling_usd)
        others = {urlsplit(one.base_url).netloc for one in teachers if not is_local(one.base_url)}
        if hosts := sorted(others - opened.hosts()):
            request = wording.request(next(plan.states(store)), teachers[0])
            if not agree(hosts, request.decode()):
                raise BadInput(f"nothing was sent, since it may not go to {', '.join(hosts)}")
            opened.agree(hosts)
        await _ask_all(pool, plan.states(store), lambda done: progress(done, usd(opened.ledger.committed)))
        for teacher in pool:
            await teacher.settle_lost()
        return report(plan, pool, opened, settled_before)


async def _ask_all(pool: Sequence[Teacher], waiting: Iterator[TraceState], done: Callable[[int], None]) -> None:
    """Settle all decision points, begun in their order, many at once."""
    numbers = sorted({teacher.config.tier for teacher in pool})
    tiers = [[teacher for teacher in pool if teacher.config.tier == number] for number in numbers]
    num_done = 0

    async def work() -> None:
        nonlocal num_done
        for state in waiting:
            try:
                await _settle(state, tiers)
            except ComposerPrimeError:
                deque(waiting, maxlen=0)  # nobody begins another; what is in flight, and paid, comes home
                raise
            num_done += 1
            done(num_done)

    done(0)
    workers = [work() for teacher in pool for _ in range(teacher.config.max_in_flight)]
    for ended in await asyncio.gather(*workers, return_exceptions=True):
        if ended is not None:
            raise ended


async def _settle(state: TraceState, tiers: Iterable[Sequence[Teacher]]) -> None:
    """Ask one tier after the other until two actions are the same."""
    actions: list[Message] = []
    for tier in tiers:
        found = await asyncio.gather(*(teacher.ask(state) for teacher in tier))
        actions += [action for action in found if action is not None]
        if any(same_action(*two, state.tools, state.cwd) for two in combinations(actions, 2)):
            return


def _check_ceiling(plan: Plan, teachers: Sequence[TextTeacher], opened: OpenFolder, ceiling_usd: float) -> None:
    """Raise BadInput when no call that is still to be sent first fits below the ceiling."""
    first, amounts = min(teacher.tier for teacher in teachers), []
    for teacher in (teacher for teacher in teachers if teacher.tier == first):
        if left := plan.left(teacher, opened.kept):
            amounts.append(worst_case(teacher, frame_bytes(teacher) + min(point.num_bytes for point in left)))
    if amounts and (least := opened.ledger.needed(min(amounts))) > ceiling_usd * NANO:
        raise BadInput(
            f"--ceiling-usd ({ceiling_usd:g}) is below one call, with ${usd(opened.ledger.committed):g} settled or "
            f"reserved in this folder: give at least {math.ceil(least / 1000) / 10**6:.6f}"
        )
