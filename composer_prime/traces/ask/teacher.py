"""One teacher over a run: asked with dollars put aside, at a pace that it bears, and no more once it is of no use."""

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.errors import TeacherError
from composer_prime.traces.ask import prices
from composer_prime.traces.ask.batch import BatchClient
from composer_prime.traces.ask.client import ChatClient, Reply
from composer_prime.traces.ask.folder import OpenFolder
from composer_prime.traces.ask.ledger import Record
from composer_prime.traces.ask.pace import Pace
from composer_prime.traces.ask.questions import Unusable, Wording, key_of, read_action, read_choice, sampling_id
from composer_prime.traces.states import Message, TraceState

TRIES = 4
"""Requests sent for one answer at most, those aside that the server refused for speed."""

RETRY_WAIT_S = 0.5
"""Before the second try, doubled before each one after it, where the server names no pause."""

LONGEST_WAIT_S = 60.0
"""A server that wants a longer pause, but not for speed, has failed."""

DEAD_AFTER = 3
"""Questions in a row without an answer, after which a teacher is asked no more in this run."""

USELESS_AFTER = 5
"""Answers in a row that are of no use, after which it is asked no more in this run; refusals, if it never answered."""


@dataclass
class TeacherReport:
    """One teacher on the decision points of a run.

    num_answered, num_unusable  of them, by this run and earlier ones; for usd in all
    num_failed                  questions that got no answer in this run
    num_waiting                 questions that weren't sent since they don't fit below the ceiling
    stopped                     why it is asked no more; None: it is
    """

    name: str
    num_answered: int = 0
    num_unusable: int = 0
    usd: float = 0.0
    num_failed: int = 0
    num_waiting: int = 0
    stopped: str | None = None
    last_failure: str | None = None

    def lines(self) -> Iterator[str]:
        line = f"{self.name}: {self.num_answered} answers, {self.num_unusable} unusable, ${self.usd:.6f}"
        if self.num_failed:
            line += f"; {self.num_failed} without an answer"
            line += f" (last: {self.last_failure})" if self.last_failure and not self.stopped else ""
        if self.num_waiting:
            line += f"; {self.num_waiting} don't fit below the ceiling: raise --ceiling-usd"
        yield line
        if self.stopped:
            yield f"{self.name} is asked no more: {self.stopped}"


class Teacher:
    """Asks one teacher. `close` it in the end."""

    def __init__(self, config: TextTeacher, folder: OpenFolder, wording: Wording) -> None:
        self.config = config
        self.report = TeacherReport(config.name)
        self._folder = folder
        self._ledger = folder.ledger
        self._wording = wording
        self._sampling = sampling_id(config)
        self._pace = Pace()
        most = config.max_in_flight
        self._chat = ChatClient(config.base_url, config.timeout_s, config.api_key_var, config.headers, config.path)
        self._client = BatchClient(self._chat, config.path, folder.database, most) if config.batch else self._chat
        self._failures_in_a_row = self._useless_in_a_row = self._useless_cost = 0
        before = self._ledger.experience(config.name, config.model)
        self._has_answered = before.num_usable > 0
        first = most if config.batch or self._has_answered else 1  # a teacher of no use is found out by few
        self._slots, self._num_more_slots = asyncio.Semaphore(first), most - first
        if before.newest is not None and _is_dear(config, before.newest):
            self._stop(_dear_words(before.newest))

    async def close(self) -> None:
        await self._client.close()

    async def settle_lost(self) -> None:
        """Ask the provider what lost calls cost, if it tells; give back what is reserved for those of long ago."""
        own = (self.config.name, self.config.model)
        lost = [record for record in self._ledger.lost() if (record.teacher, record.model_requested) == own]

        async def settle(record: Record) -> None:
            age_s, url = time.time() - record.at, self.config.usage_url
            told = None if url is None else await self._chat.cost_of(record.call, url)
            never_came = told == {"cost": None} and age_s > self.config.timeout_s
            if (cost := 0 if never_came else prices.read_dollars(told, "cost")) is not None:
                self._ledger.note(dataclasses.replace(record, settled_nano_usd=cost))
            elif age_s > self.config.release_lost_after_s:
                self._ledger.note(dataclasses.replace(record, outcome="released", settled_nano_usd=0))

        for start in range(0, len(lost), self.config.max_in_flight):
            await asyncio.gather(*map(settle, lost[start : start + self.config.max_in_flight]))
        await self._folder.database.synced()

    async def ask(self, state: TraceState) -> Message | None:
        """What the teacher would do, without asking again where it has answered; None where it says nothing of use."""
        key = key_of(self._sampling, state.question)
        if key in self._folder.kept:
            return self._folder.find(key)
        if self.report.stopped is None:
            async with self._slots:
                return await self._try(state, key)
        self.report.num_failed += 1
        return None

    async def _try(self, state: TraceState, key: str) -> Message | None:
        body = self._wording.request(state, self.config)
        amount = prices.worst_case(self.config, len(body))
        num_tries = 0
        while self.report.stopped is None:
            left_at = await self._pace.turn()
            if (call := await self._ledger.reserve(key, self.config.name, self.config.model, amount)) is None:
                self.report.num_waiting += 1
                return None
            start = time.monotonic()
            try:
                reply = await self._client.complete(body, call.call)
            except TeacherError as error:  # its batch is still out, and so is the call in the ledger
                self._ledger.leave_open()
                self._stop(f"{error}: the same command goes on with it")
                break
            call = dataclasses.replace(call, latency_s=round(time.monotonic() - start, 3))
            if reply.why is None:
                self._pace.answered(reply.pause_s)
                return self._keep(state, call, reply.answer)
            # What was refused is free, what was lost keeps its reservation.
            ended = {"outcome": "lost"} if reply.is_lost else {"outcome": "refused", "settled_nano_usd": 0}
            self._ledger.close_call(dataclasses.replace(call, **ended))
            if reply.is_too_fast and self._pace.refused(left_at, reply.pause_s):
                continue
            num_tries += 1
            wait_s = RETRY_WAIT_S * 2 ** (num_tries - 1) if reply.pause_s is None else reply.pause_s
            if reply.is_too_fast or not reply.is_passing or wait_s > LONGEST_WAIT_S or num_tries == TRIES:
                self._fail(reply)
                break
            await asyncio.sleep(wait_s)
        self.report.num_failed += 1
        return None

    def _keep(self, state: TraceState, call: Record, answer: Any) -> Message | None:
        action = why = None
        try:
            action = read_action(read_choice(answer), state.tools)
        except Unusable as error:
            why = str(error)
        record = _settled(self.config, call, answer, is_usable=action is not None)
        cost = record.settled_nano_usd or 0
        self._failures_in_a_row = 0
        if cost > record.reserved_nano_usd or _is_dear(self.config, record):
            self._stop(_dear_words(record))
        elif action is not None:
            self._has_answered = True
            self._useless_in_a_row = self._useless_cost = 0
            if self._num_more_slots:
                self._num_more_slots -= 1
                self._slots.release()
        else:
            self._useless_cost += cost
            spent = f"; ${prices.usd(self._useless_cost):.6f} went for them"
            self._note_useless(f"{USELESS_AFTER} answers in a row are of no use, the last with: {why}{spent}")
        self._folder.keep(state.id, self._sampling, record, action, why)
        return action

    def _fail(self, reply: Reply) -> None:
        self.report.last_failure = reply.why
        if reply.is_final:
            self._stop(reply.why)
        elif reply.is_too_fast:
            self._stop(f"it refuses for too long: {reply.why}")
        elif not reply.is_about_this:
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= DEAD_AFTER:
                self._stop(f"{DEAD_AFTER} questions in a row failed, the last with: {reply.why}")
        elif not self._has_answered:
            self._note_useless(f"it refused {USELESS_AFTER} questions and answered none, the last with: {reply.why}")

    def _note_useless(self, words: str) -> None:
        self._useless_in_a_row += 1
        if self._useless_in_a_row >= USELESS_AFTER:
            self._stop(words)

    def _stop(self, why: str | None) -> None:
        self.report.stopped = self.report.stopped or why


def _settled(config: TextTeacher, call: Record, answer: Any, is_usable: bool) -> Record:
    """How a call ended that got an answer; one that doesn't say what it took costs its reservation."""
    answer = answer if isinstance(answer, dict) else {}
    model, usage = answer.get("model"), prices.read_usage(answer)
    tokens = {} if usage is None else {name: value for name, value in vars(usage).items() if name != "cost"}
    return dataclasses.replace(
        call,
        outcome="answered" if is_usable else "unusable",
        model_used=model if isinstance(model, str) else None,
        settled_nano_usd=call.reserved_nano_usd if usage is None else prices.charge(config, usage),
        **tokens,
    )


def _is_dear(config: TextTeacher, record: Record) -> bool:
    """Whether a call cost more than the teachers' file says that its tokens cost."""
    if record.settled_nano_usd is None or record.prompt_tokens is None or record.completion_tokens is None:
        return False
    usage = prices.Usage(
        record.prompt_tokens, record.cached_tokens or 0, record.cache_write_tokens or 0, record.completion_tokens
    )
    return record.settled_nano_usd > prices.at_prices(config, usage) * prices.PRICE_TOLERANCE + 1


def _dear_words(record: Record) -> str:
    took = f"{record.prompt_tokens} + {record.completion_tokens} tokens"
    return f"it charged ${record.usd_settled:g} for {took}, more than its prices in the teachers' file: correct them"
