"""The thread a model decodes on: it takes what waits, runs one step, answers what is over, and starts again.

Only this thread touches the model once it runs. Its callers are on an event loop, where all futures live.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from composer_prime.errors import SiteError
from composer_prime.sites.embedded.inference.decoder import Decoder, Sequence

STOP_TIMEOUT_S = 1.0

_Call = tuple[Callable[[], None], "asyncio.Future[None]"]


class Worker:
    """Runs sequences, at most `max_batch_size` at a time; further ones wait in order of arrival.

    load        gives the model; called on the thread, first thing.
    on_failure  called on the event loop when an exception has ended the thread after its start; what waits fails too.
    num_threads torch's threads for a decoding step.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        max_batch_size: int,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[BaseException], None],
        num_threads: int = 1,
    ) -> None:
        self._load = load
        self._num_threads = num_threads
        self._max_batch_size = max_batch_size
        self._loop = loop
        self._on_failure = on_failure
        self._started: asyncio.Future[PreTrainedModel] = loop.create_future()
        self._futures: dict[int, asyncio.Future[None]] = {}  # by id of what is waited for; for the event loop only
        self._changes = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._calls: deque[_Call] = deque()
        self._end: str | None = None  # why no more work is taken
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)

    async def start(self) -> PreTrainedModel:
        """Load the model and give it once work is taken. Raises what loading raises."""
        self._thread.start()
        return await self._started

    async def run(self, sequence: Sequence) -> None:
        """Return when the sequence is over. Raises SiteError when the thread ends before it."""
        future = self._futures[id(sequence)] = self._loop.create_future()
        try:
            with self._changes:
                self._refuse_ended()
                self._waiting.append(sequence)
                self._changes.notify()
            await future
        finally:
            del self._futures[id(sequence)]

    async def call(self, function: Callable[[], None]) -> None:
        """Run a function that changes the model, on the thread; nothing may be in flight. Raises as `run`."""
        future: asyncio.Future[None] = self._loop.create_future()
        with self._changes:
            self._refuse_ended()
            self._calls.append((function, future))
            self._changes.notify()
        self._futures[id(future)] = future
        try:
            await future
        finally:
            del self._futures[id(future)]

    def stop(self) -> None:
        """End the thread after the step it is in, which may outlast the second we wait: it dies with the process."""
        with self._changes:
            self._end = self._end or "the server is closing"
            self._changes.notify()
        self._thread.join(STOP_TIMEOUT_S)

    def _refuse_ended(self) -> None:
        if self._end is not None:
            raise SiteError(f"inference engine takes no requests: {self._end}")

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            model = self._load()
            self._decoder = Decoder(model)
            self._loop.call_soon_threadsafe(self._started.set_result, model)
            while self._end is None:
                self._turn()
        except Exception as error:  # the border of a thread: the event loop must hear of it, whatever it is
            with self._changes:
                self._end = f"{type(error).__name__}: {error}"
            self._loop.call_soon_threadsafe(self._fail, error)
        self._loop.call_soon_threadsafe(self._fail_all)

    def _turn(self) -> None:
        arrived, calls = self._take()
        for function, future in calls:
            function()
            self._decoder.forget()
            self._loop.call_soon_threadsafe(_resolve, future)
        if arrived:
            self._answer(self._decoder.admit(arrived))
        if self._decoder.num_running:
            self._answer(self._decoder.step())

    def _take(self) -> tuple[list[Sequence], list[_Call]]:
        """What to do next; waits while there is nothing."""
        with self._changes:
            while not (self._waiting or self._calls or self._decoder.num_running or self._end):
                self._changes.wait()
            num_free = self._max_batch_size - self._decoder.num_running
            arrived = [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))]
            calls = list(self._calls)
            self._calls.clear()
            return arrived, calls

    def _answer(self, over: list[Sequence]) -> None:
        if over:
            self._loop.call_soon_threadsafe(self._resolve_all, over)

    def _resolve_all(self, over: list[Sequence]) -> None:
        for sequence in over:
            if (future := self._futures.get(id(sequence))) is not None:
                _resolve(future)

    def _fail(self, error: Exception) -> None:
        if self._started.done():
            self._on_failure(error)
        else:
            self._started.set_exception(error)

    def _fail_all(self) -> None:
        for future in self._futures.values():
            if not future.done():
                future.set_exception(SiteError(f"inference engine ended during the request: {self._end}"))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
