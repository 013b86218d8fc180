"""The replay server: answers `/inference/v1/generate` with what a teacher wrote before, so that PRIME-RL can learn it.

Upstream's `sft` algorithm generates with a frozen model and trains on its tokens; here that model is a file of traces.
A request is answered by the stored turn whose prompt has exactly the same token ids, so an environment that renders its
prompts as it did then plays the whole conversation again.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import socket
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from composer_prime.bearer import OnlyWithToken, user_token
from composer_prime.errors import BadInput
from composer_prime.traces.turns import Turn

UNKNOWN_LOGPROB = -1e-9
"""Stands for a logprob that wasn't stored: clients want a finite number, and the ce term doesn't read it."""

logger = logging.getLogger(__name__)


class Library:
    """Stored turns by prompt. Several turns for one prompt are given out in turn, in the order of the file."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._turns: dict[bytes, list[tuple[array[int], list[float] | None]]] = defaultdict(list)
        self._given: dict[bytes, int] = defaultdict(int)
        for turn in turns:
            self._turns[_key(turn.prompt)].append((array("q", turn.completion), turn.logprobs))

    @property
    def num_prompts(self) -> int:
        return len(self._turns)

    @property
    def num_turns(self) -> int:
        return sum(map(len, self._turns.values()))

    def next(self, prompt: Sequence[int]) -> tuple[list[int], list[float] | None] | None:
        """Token ids and logprobs of the next stored turn after this prompt; None when there is no such prompt."""
        key = _key(prompt)
        stored = self._turns.get(key)
        if stored is None:
            return None
        completion, logprobs = stored[self._given[key] % len(stored)]
        self._given[key] += 1
        return completion.tolist(), logprobs


class ReplayServer:
    """Answers for one library, under one model name."""

    def __init__(self, library: Library, model: str) -> None:
        self._library = library
        self._model = model

    def app(self) -> Starlette:
        """The three routes that a frozen model of PRIME-RL is asked by."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ready", "num_prompts": self._library.num_prompts})

    async def _models(self, request: Request) -> JSONResponse:
        card = {"id": self._model, "object": "model", "owned_by": "composer-prime"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _generate(self, request: Request) -> JSONResponse:
        try:
            prompt, max_tokens, stops = self._parse(await request.body())
        except BadInput as error:
            return _error(400, "invalid_request_error", str(error))
        stored = self._library.next(prompt)
        if stored is None:
            logger.warning("prompt=%d tokens isn't stored", len(prompt))
            return _error(
                404,
                "not_found_error",
                f"no stored trace has this prompt of {len(prompt)} tokens ({self._library.num_prompts} prompts are "
                "stored): the task, the renderer, the tools or an earlier turn differ from when the traces were made",
            )
        return JSONResponse(_answer(prompt, *stored, max_tokens=max_tokens, stops=stops))

    def _parse(self, body: bytes) -> tuple[list[int], int | None, Sequence[int]]:
        """The prompt, the most tokens wanted, and the stop tokens; further sampling settings mean nothing here."""
        try:
            asked = json.loads(body)
            prompt, sampling = asked["token_ids"], asked.get("sampling_params") or {}
            max_tokens, stops = sampling.get("max_tokens"), sampling.get("stop_token_ids") or []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"body must be an object with token_ids and sampling_params: {error!r}") from error
        if asked.get("model") not in (None, self._model):
            raise BadInput(f"model ({asked['model']}) isn't served here: ask for {self._model}")
        if not isinstance(prompt, list) or not all(type(token) is int and token >= 0 for token in prompt):
            raise BadInput("token_ids must be a list of whole numbers from 0")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise BadInput(f"max_tokens ({max_tokens!r}) must be a whole number from 1")
        if sampling.get("prompt_logprobs") is not None or sampling.get("n") not in (None, 1):
            raise BadInput("prompt_logprobs and n above 1 aren't stored: leave them out")
        return prompt, max_tokens, stops


def serve_library(library: Library, model: str, listener: socket.socket) -> None:
    """Answer with stored turns, under that model name and with the user's token, until SIGINT or SIGTERM."""
    app = OnlyWithToken(ReplayServer(library, model).app(), user_token())
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def _key(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


def _answer(
    prompt: Sequence[int],
    completion: list[int],
    logprobs: list[float] | None,
    *,
    max_tokens: int | None,
    stops: Sequence[int],
) -> dict[str, Any]:
    """The answer as renderers' client reads it. A stored turn that is longer than `max_tokens` ends by "length"."""
    given = completion[:max_tokens]
    scores = [UNKNOWN_LOGPROB] * len(given) if logprobs is None else logprobs[: len(given)]
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": score}
        for token, score in zip(given, scores, strict=True)
    ]
    is_cut = len(given) < len(completion)
    choice = {
        "index": 0,
        "finish_reason": "stop" if not is_cut and (not stops or given[-1] in stops) else "length",
        "token_ids": given,
        "logprobs": {"content": content},
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(given), "total_tokens": len(prompt) + len(given)}
    return {"request_id": f"replay-{secrets.token_hex(8)}", "choices": [choice], "usage": usage}


def _error(status: int, kind: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)
