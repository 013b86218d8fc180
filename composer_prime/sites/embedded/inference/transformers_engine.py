"""The default engine: a transformers model on a CPU thread of its own, fed and answered from the event loop.

The thread takes what waits, runs one step for everything in flight, answers what is over, and starts again. Only it
touches the model once it runs.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence as SequenceOf
from pathlib import Path

import torch
from transformers import PreTrainedModel

from composer_prime.errors import BadInput, SiteError
from composer_prime.sites.embedded.inference.decoder import Decoder, Sequence
from composer_prime.sites.embedded.inference.engine import Completion, Gate, GenerateRequest
from composer_prime.sites.embedded.inference.reload import copy_weights, read_weights
from composer_prime.sites.embedded.model import load_policy

_CLOSE_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


class TransformersEngine:
    """See `Engine`. Requests beyond `max_batch_size` wait their turn.

    folder         the model's.
    seed           of the requests that bring none: the same requests in the same order give the same tokens.
    max_model_len  upper bound; the model's own is taken when it is lower.
    on_failure     called on the event loop when the engine can't go on; all requests fail from then on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        max_batch_size: int,
        max_model_len: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.max_model_len = max_model_len
        self.policy_version = 0
        self._folder = folder
        self._seeds = random.Random(seed)
        self._max_batch_size = max_batch_size
        self._on_failure = on_failure
        self._gate = Gate()
        self._is_started = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(None, load_policy, self._folder)
        self.max_model_len = min(self.max_model_len, _num_positions(model, self.max_model_len))
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._end_tokens = _end_tokens(model)
        self._model = model
        self._worker = _Worker(model, self._max_batch_size, loop, self._on_failure)
        self._worker.start()
        self._is_started = True

    async def generate(self, request: GenerateRequest) -> Completion:
        sequence = self._sequence(request)
        async with self._gate.passing():
            version = self.policy_version
            await self._worker.run(sequence)
        if sequence.finish_reason is None:
            raise SiteError(
                f"policy version {version} gave logits that aren't finite after {len(sequence.token_ids)} tokens: "
                "lower the learning rate"
            )
        return Completion(
            request.request_id, sequence.token_ids, sequence.logprobs, sequence.finish_reason, policy_version=version
        )

    async def load_weights(self, folder: Path, version: int) -> None:
        loop = asyncio.get_running_loop()
        weights = await loop.run_in_executor(None, read_weights, folder, self._model)
        async with self._gate.idle():
            await self._worker.call(lambda: copy_weights(weights, self._model))
            self.policy_version = version

    async def pause(self) -> None:
        await self._gate.pause()

    async def resume(self) -> None:
        await self._gate.resume()

    async def close(self) -> None:
        if self._is_started:
            await asyncio.get_running_loop().run_in_executor(None, self._worker.stop)

    def _sequence(self, request: GenerateRequest) -> Sequence:
        sampling = request.sampling
        room = self.max_model_len - len(request.token_ids)
        if room < 1:
            raise BadInput(
                f"prompt ({len(request.token_ids)} tokens) must be shorter than the context ({self.max_model_len} "
                "tokens): shorten it"
            )
        largest = max(request.token_ids)
        if largest >= self._vocabulary:
            raise BadInput(f"token_ids ({largest}) must be below the vocabulary's size ({self._vocabulary})")
        return Sequence(
            request,
            max_tokens=min(room, sampling.max_tokens or room),
            stop_token_ids=sampling.stop_token_ids | self._end_tokens,
            randomness=random.Random(sampling.seed if sampling.seed is not None else self._seeds.getrandbits(64)),
        )


class _Worker(threading.Thread):
    """The thread. Its methods are for the event loop; each returns when the thread has done what was asked."""

    def __init__(
        self,
        model: PreTrainedModel,
        max_batch_size: int,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="decoder", daemon=True)
        self._decoder = Decoder(model)
        self._max_batch_size = max_batch_size
        self._loop = loop
        self._on_failure = on_failure
        self._changes = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._calls: deque[tuple[Callable[[], None], asyncio.Future[None]]] = deque()
        self._futures: dict[int, asyncio.Future[None]] = {}  # by id of the sequence; touched on the event loop only
        self._is_stopping = False
        self._failure: BaseException | None = None

    async def run(self, sequence: Sequence) -> None:
        """Return when the sequence is over. Raises SiteError when the thread can't finish it."""
        future = self._futures[id(sequence)] = self._loop.create_future()
        try:
            with self._changes:
                self._refuse_dead()
                self._waiting.append(sequence)
                self._changes.notify()
            await future
        finally:
            del self._futures[id(sequence)]

    async def call(self, function: Callable[[], None]) -> None:
        """Run a function on the thread while nothing is in flight; cached prompts are forgotten after it."""
        future = self._loop.create_future()
        with self._changes:
            self._refuse_dead()
            self._calls.append((function, future))
            self._changes.notify()
        await future

    def stop(self) -> None:
        """End the thread after the step it is in."""
        with self._changes:
            self._is_stopping = True
            self._changes.notify()
        self.join(_CLOSE_TIMEOUT_S)

    def _refuse_dead(self) -> None:
        if self._is_stopping or self._failure is not None:
            raise SiteError(f"inference engine has stopped: {self._failure or 'the server is closing'}")

    # From here on: the thread itself.

    def run_forever(self) -> None:
        torch.set_num_threads(1)
        while not self._is_stopping:
            arrived, calls = self._take()
            for function, future in calls:
                function()
                self._decoder.forget_prompts()
                self._loop.call_soon_threadsafe(_resolve, future)
            if arrived:
                self._answer(self._decoder.admit(arrived))
            if self._decoder.num_running:
                self._answer(self._decoder.step())

    def _take(self) -> tuple[list[Sequence], list[tuple[Callable[[], None], asyncio.Future[None]]]]:
        """What to do next; waits while there is nothing."""
        with self._changes:
            while not (self._waiting or self._calls or self._decoder.num_running or self._is_stopping):
                self._changes.wait()
            free = self._max_batch_size - self._decoder.num_running
            arrived = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            calls = list(self._calls)
            self._calls.clear()
            return arrived, calls

    def _answer(self, sequences: SequenceOf[Sequence]) -> None:
        if sequences:
            self._loop.call_soon_threadsafe(self._resolve_all, list(sequences))

    def _resolve_all(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            future = self._futures.get(id(sequence))
            if future is not None and not future.done():
                future.set_result(None)
