"""One teacher over a run: asked with dollars put aside, again after passing faults, and no more once it is dead."""

import asyncio
import dataclasses
import time

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask.client import ChatClient, Reply
from composer_prime.traces.ask.folder import Kept, OpenFolder
from composer_prime.traces.ask.ledger import CeilingReached, Outcome, Record
from composer_prime.traces.ask.prices import PRICE_TOLERANCE, at_prices, charge, nano_usd, read_usage, usd, worst_case
from composer_prime.traces.ask.questions import Question, Unusable, read_action, read_choice, sampling_id

TRIES = 4
"""Requests sent for one answer at most."""

RETRY_WAIT_S = 0.5
"""Before the second try, doubled before each one after it, where the server names no pause."""

LONGEST_WAIT_S = 60.0
"""A server that wants a longer pause has failed."""

DEAD_AFTER = 3
"""Questions in a row without an answer, after which a teacher is asked no more in this run."""


class Teacher:
    """Asks one teacher. `close` it in the end.

    stopped      why it is asked no more; None: it is
    num_failed   questions that got no answer
    num_waiting  questions that weren't sent since they don't fit below the ceiling
    """

    def __init__(self, config: TextTeacher, folder: OpenFolder) -> None:
        self.config = config
        self.stopped = _dear(config, folder)
        self.num_failed = 0
        self.num_waiting = 0
        self.last_failure: str | None = None
        self._folder = folder
        self._client = ChatClient(config.base_url, config.timeout_s, config.api_key_var)
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._failures_in_a_row = 0

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def ask(self, question: Question) -> Kept | None:
        """What the teacher writes, usable or not, from the cache if it is there; None where there is no answer now."""
        if (kept := self._folder.find(question)) is not None:
            return kept
        async with self._slots:
            try:
                return await self._try(question)
            except CeilingReached:
                self.num_waiting += 1
                return None

    async def _try(self, question: Question) -> Kept | None:
        body = question.body()
        amount = worst_case(self.config, len(body))
        for attempt in range(TRIES):
            if self.stopped is not None:
                self.num_failed += 1
                return None
            call = await self._folder.ledger.reserve(question.key, self.config.name, self.config.model, amount)
            start = time.monotonic()
            reply = await self._client.complete(body)
            call = dataclasses.replace(call, latency_s=round(time.monotonic() - start, 3))
            if reply.why is None:
                return await self._keep(question, call, reply)
            await self._folder.ledger.close_call(_without_answer(call, reply))
            wait_s = RETRY_WAIT_S * 2**attempt if reply.retry_after_s is None else reply.retry_after_s
            if not reply.is_passing or wait_s > LONGEST_WAIT_S or attempt + 1 == TRIES:
                self._fail(reply)
                return None
            await asyncio.sleep(wait_s)
        return None

    async def _keep(self, question: Question, call: Record, reply: Reply) -> Kept:
        action = why = None
        self._failures_in_a_row += 1
        try:
            choice = read_choice(reply.answer)
            self._failures_in_a_row = 0
            action = read_action(choice, question.situation.state.tools)
        except Unusable as error:
            why = str(error)
        record = _settled(self.config, call, reply, "unusable" if action is None else "answered")
        if nano_usd(record.usd_settled or 0) > nano_usd(record.usd_reserved) or _is_dear(self.config, record):
            self.stopped = _dear_words(self.config, record)
        elif self._failures_in_a_row >= DEAD_AFTER:
            self._stop(f"{why}")
        kept = Kept(question.situation.id, sampling_id(self.config), record, action, why)
        await self._folder.keep(kept)
        return kept

    def _fail(self, reply: Reply) -> None:
        self.num_failed += 1
        self.last_failure = reply.why
        if not reply.is_about_this:
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= DEAD_AFTER:
                self._stop(f"{reply.why}")

    def _stop(self, why: str) -> None:
        self.stopped = self.stopped or f"{DEAD_AFTER} questions in a row failed, the last with: {why}"


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
    if (usage := read_usage(answer)) is None:
        return call
    return dataclasses.replace(
        call,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        usd_settled=usd(charge(config, usage)),
    )


def _is_dear(config: TextTeacher, record: Record) -> bool:
    """Whether a call cost more than the teachers' file says that its tokens cost."""
    if record.usd_settled is None or record.prompt_tokens is None or record.completion_tokens is None:
        return False
    told = at_prices(config, record.prompt_tokens, record.cached_tokens or 0, record.completion_tokens)
    return nano_usd(record.usd_settled) > told * PRICE_TOLERANCE + 1


def _dear_words(config: TextTeacher, record: Record) -> str:
    took = f"{record.prompt_tokens} + {record.completion_tokens} tokens"
    return f"it charged ${record.usd_settled:g} for {took}, more than its prices in the teachers' file: correct them"


def _dear(config: TextTeacher, folder: OpenFolder) -> str | None:
    """Why a teacher isn't asked at all: its newest answer in the ledger cost more than the file says."""
    own = [
        record
        for record in folder.ledger.records
        if record.has_answer and (record.teacher, record.model_requested) == (config.name, config.model)
    ]
    return _dear_words(config, own[-1]) if own and _is_dear(config, own[-1]) else None
