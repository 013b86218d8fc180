"""One teacher over a run: asked with dollars put aside, at a pace that it bears, and no more once it is of no use."""

import asyncio
import dataclasses
import time

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.errors import TeacherError
from composer_prime.traces.ask import prices
from composer_prime.traces.ask.batch import BatchClient
from composer_prime.traces.ask.client import ChatClient, Reply
from composer_prime.traces.ask.folder import Kept, OpenFolder
from composer_prime.traces.ask.ledger import CeilingReached, Outcome, Record
from composer_prime.traces.ask.pace import Pace
from composer_prime.traces.ask.questions import Question, Unusable, Wording, read_action, read_choice, sampling_id

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


class Teacher:
    """Asks one teacher. `close` it in the end.

    stopped      why it is asked no more; None: it is
    num_failed   questions that got no answer
    num_waiting  questions that weren't sent since they don't fit below the ceiling
    cached_cost  nano-dollars of the answers that earlier runs had paid for
    """

    def __init__(self, config: TextTeacher, folder: OpenFolder, wording: Wording) -> None:
        self.config = config
        self.num_failed = 0
        self.num_waiting = 0
        self.cached_cost = 0
        self.last_failure: str | None = None
        self._folder = folder
        self._wording = wording
        self._pace = Pace()
        client = ChatClient(config.base_url, config.timeout_s, config.api_key_var, config.headers, config.path)
        is_batch, most = config.batch, config.max_in_flight
        self._client = BatchClient(client, config.path, folder.batches, most) if is_batch else client
        self._failures_in_a_row = 0
        self._useless_in_a_row = 0
        self._useless_cost = 0
        before = folder.ledger.totals.experience(config.name, config.model)
        self._has_answered = before.num_usable > 0
        first = most if is_batch or self._has_answered else 1  # a teacher of no use is found out by few
        self._slots, self._num_more_slots = asyncio.Semaphore(first), most - first
        self.stopped = _dear_words(config, before.newest) if before.newest and _is_dear(config, before.newest) else None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def settle_lost(self) -> None:
        """Ask the provider what lost calls cost, if it tells; give back what is reserved for those of long ago."""
        ledger = self._folder.ledger
        own = (self.config.name, self.config.model)
        lost = [record for record in ledger.totals.lost if (record.teacher, record.model_requested) == own]

        async def settle(record: Record) -> None:
            age_s = time.time() - record.at
            if self.config.usage_url is not None:
                told = await self._client.cost_of(record.call, self.config.usage_url)
                if (cost := prices.read_dollars(told, "cost")) is not None:
                    return ledger.settle_lost(record, cost)
                if told == {"cost": None} and age_s > self.config.timeout_s:  # it never came there
                    return ledger.settle_lost(record, 0)
            if age_s > self.config.release_lost_after_s:
                ledger.release(record)

        for start in range(0, len(lost), self.config.max_in_flight):
            await asyncio.gather(*map(settle, lost[start : start + self.config.max_in_flight]))

    async def ask(self, question: Question) -> Kept | None:
        """What the teacher writes, usable or not, from the cache if it is there; None where there is no answer now."""
        if (kept := self._folder.find(question)) is not None:
            self.cached_cost += prices.nano_usd(kept.record.usd_settled or 0)
            return kept
        if self.stopped is not None:
            self.num_failed += 1
            return None
        async with self._slots:
            try:
                kept = await self._try(question)
            except CeilingReached:
                self.num_waiting += 1
                return None
            except TeacherError as error:  # its batch is still out, and so is the call in the ledger
                self.stopped = self.stopped or f"{error}: the same command goes on with it"
        self.num_failed += kept is None
        return kept

    async def _try(self, question: Question) -> Kept | None:
        body = question.body(self._wording)
        amount = prices.worst_case(self.config, len(body))
        attempt = 0
        while self.stopped is None:
            left_at = await self._pace.turn()
            call = self._folder.ledger.resumed(question.key)
            if call is None:
                call = await self._folder.ledger.reserve(question.key, self.config.name, self.config.model, amount)
            start = time.monotonic()
            try:
                reply = await self._client.complete(body, call.call)
            except TeacherError:
                await self._folder.ledger.leave_open()
                raise
            call = dataclasses.replace(call, latency_s=round(time.monotonic() - start, 3))
            if reply.why is None:
                self._pace.answered(reply.pause_s)
                return await self._keep(question, call, reply)
            await self._folder.ledger.close_call(_without_answer(call, reply))
            if reply.is_too_fast and self._pace.refused(left_at, reply.pause_s):
                continue
            attempt += 1
            wait_s = RETRY_WAIT_S * 2 ** (attempt - 1) if reply.pause_s is None else reply.pause_s
            if reply.is_too_fast or not reply.is_passing or wait_s > LONGEST_WAIT_S or attempt == TRIES:
                self._fail(reply)
                return None
            await asyncio.sleep(wait_s)
        return None

    async def _keep(self, question: Question, call: Record, reply: Reply) -> Kept:
        action = why = None
        try:
            action = read_action(read_choice(reply.answer), question.state.tools)
        except Unusable as error:
            why = str(error)
        record = _settled(self.config, call, reply, "unusable" if action is None else "answered")
        self._failures_in_a_row = 0
        cost = prices.nano_usd(record.usd_settled or 0)
        if cost > prices.nano_usd(record.usd_reserved) or _is_dear(self.config, record):
            self.stopped = _dear_words(self.config, record)
        elif action is not None:
            self._has_answered = True
            self._useless_in_a_row = self._useless_cost = 0
            if self._num_more_slots:
                self._num_more_slots -= 1
                self._slots.release()
        else:
            self._useless_in_a_row += 1
            self._useless_cost += cost
            if self._useless_in_a_row >= USELESS_AFTER:
                self._stop(f"{self._useless_in_a_row} answers in a row are of no use", why, self._useless_cost)
        kept = Kept(question.state.id, sampling_id(self.config), record, action, why)
        await self._folder.keep(kept)
        return kept

    def _fail(self, reply: Reply) -> None:
        self.last_failure = reply.why
        if reply.is_final:
            self.stopped = self.stopped or reply.why
        elif reply.is_too_fast:
            self.stopped = self.stopped or f"it refuses for too long: {reply.why}"
        elif not reply.is_about_this:
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= DEAD_AFTER:
                self._stop(f"{DEAD_AFTER} questions in a row failed", reply.why)
        elif not self._has_answered:
            self._useless_in_a_row += 1
            if self._useless_in_a_row >= USELESS_AFTER:
                self._stop(f"it refused {USELESS_AFTER} questions and answered none", reply.why)

    def _stop(self, what: str, why: str | None, cost: int | None = None) -> None:
        spent = "" if cost is None else f"; ${prices.usd(cost):.6f} went for them"
        self.stopped = self.stopped or f"{what}, the last with: {why}{spent}"


def _without_answer(call: Record, reply: Reply) -> Record:
    """How a call ended that got no answer: what was refused is free, what was lost keeps its reservation."""
    if reply.is_lost:
        return dataclasses.replace(call, outcome="lost")
    return dataclasses.replace(call, outcome="refused", usd_settled=0.0)


def _settled(config: TextTeacher, call: Record, reply: Reply, outcome: Outcome) -> Record:
    """How a call ended that got an answer; one that doesn't say what it took costs its reservation."""
    answer = reply.answer if isinstance(reply.answer, dict) else {}
    model = answer.get("model")
    call = dataclasses.replace(
        call, outcome=outcome, model_used=model if isinstance(model, str) else None, usd_settled=call.usd_reserved
    )
    if (usage := prices.read_usage(answer)) is None:
        return call
    return dataclasses.replace(
        call,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        usd_settled=prices.usd(prices.charge(config, usage)),
    )


def _is_dear(config: TextTeacher, record: Record) -> bool:
    """Whether a call cost more than the teachers' file says that its tokens cost."""
    if record.usd_settled is None or record.prompt_tokens is None or record.completion_tokens is None:
        return False
    usage = prices.Usage(
        record.prompt_tokens, record.cached_tokens or 0, record.cache_write_tokens or 0, record.completion_tokens
    )
    return prices.nano_usd(record.usd_settled) > prices.at_prices(config, usage) * prices.PRICE_TOLERANCE + 1


def _dear_words(config: TextTeacher, record: Record) -> str:
    took = f"{record.prompt_tokens} + {record.completion_tokens} tokens"
    return f"it charged ${record.usd_settled:g} for {took}, more than its prices in the teachers' file: correct them"
