"""What every engine offers the server, the records that cross the border, and the gate that keeps policies apart.

A request is sampled by one policy version from its first token to its last: new weights wait until nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request is sampled.

    temperature     0 takes the likeliest token. Log-probabilities are taken after it (at 0: at temperature 1).
    top_p           the smallest set of likeliest tokens with at least this probability is sampled from.
    max_tokens      None: as many as the context has room for.
    stop_token_ids  end a sequence, besides the model's own end tokens; the one that did is part of the answer.
    seed            the same prompt, weights and seed give the same tokens, whatever else is in the batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """One prompt to continue. Prompts with different `cache_salt` never share cached work.

    prompt_logprobs  how many of the likeliest tokens to give at each token of the prompt, besides its own, as a teacher
                     does; 0: its own alone; None: the prompt isn't scored.
    top_logprobs     how many of the likeliest tokens to give at each sampled token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    top_logprobs: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was sampled, the stop token included, with a finite log-probability per token.

    logprobs        of the sampled token under the temperature-scaled policy, all tokens allowed: top_p changes what is
                    chosen, not these (the vllm engine gives them within the top_p set).
    policy_version  training steps behind the weights that sampled all of it.
    prompt_logprobs where asked for: for every prompt token after the first, given those before it, log-probabilities by
                    token id, its own and the likeliest; at temperature 1 whatever the request samples at, as vLLM
                    has it.
    top_logprobs    where asked for: for every sampled token the likeliest in its place by token id, the likeliest
                    first, with log-probabilities of the kind that `logprobs` are.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_version: int
    prompt_logprobs: list[dict[int, float]] | None = None
    top_logprobs: list[dict[int, float]] | None = None


class Engine(Protocol):
    """Generates with one policy at a time. All methods run on the server's event loop."""

    max_model_len: int
    """Tokens a prompt and its completion may have together; known once started."""
    policy_version: int
    """Of the weights that the next request gets."""

    async def start(self) -> None:
        """Return when requests can be answered. Raises ModelError or SiteError when they never will be."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue one prompt. Raises BadInput when it has no room, SiteError when the engine fails at it."""
        ...

    async def load_weights(self, folder: Path, version: int) -> None:
        """Let what runs finish, then take the safetensors in that folder; requests meanwhile wait.

        Raises BadInput, and keeps the weights it has, when the folder doesn't hold this model's weights.
        """
        ...

    async def pause(self) -> None:
        """Hold requests back from now on; return when what runs has finished."""
        ...

    async def resume(self) -> None:
        """Let requests through again."""
        ...

    async def close(self) -> None:
        """Stop, within a second or two; requests that still run fail."""
        ...


class Gate:
    """Lets requests through, or holds them back while something needs the engine to be idle."""

    def __init__(self) -> None:
        self._num_running = 0
        self._is_paused = False
        self._changes = asyncio.Condition()
        self._exclusive = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Wait until requests are let through; inside, the request counts as running."""
        async with self._changes:
            await self._changes.wait_for(lambda: not self._is_paused and not self._exclusive.locked())
            self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            async with self._changes:
                self._changes.notify_all()

    @contextlib.asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Hold new requests back and wait until none runs; inside, none does."""
        try:
            async with self._exclusive:
                await self._drained()
                yield
        finally:
            async with self._changes:
                self._changes.notify_all()

    async def pause(self) -> None:
        """Hold new requests back until `resume`; return when none runs."""
        self._is_paused = True
        await self._drained()

    async def resume(self) -> None:
        """End a pause."""
        self._is_paused = False
        async with self._changes:
            self._changes.notify_all()

    async def _drained(self) -> None:
        async with self._changes:
            await self._changes.wait_for(lambda: self._num_running == 0)
