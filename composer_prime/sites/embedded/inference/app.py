"""The server's routes on Starlette: HTTP in, engine calls, HTTP out.

Bad bodies are answered with 400 and the reason, a failing engine with 500; with 503 everything before readiness, and
what is still under way when the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from composer_prime.config.paths import AVERAGE
from composer_prime.errors import BadInput, SiteError
from composer_prime.sites.embedded.inference import wire
from composer_prime.sites.embedded.inference.engine import Completion, Engine
from composer_prime.teachers.served import held_name

VERSION_HEADER = "x-policy-version"
TEMPLATE_S = 10.0
"""Of this thread's own time, for one chat by the model's template, which somebody else wrote."""

logger = logging.getLogger(__name__)


class Server:
    """Answers for the policy's engine, and for that of hints' teacher. `is_ready` turns true when they have started;
    after `fail` it never does.

    held  the engine of the teacher, by `held_name`. Pauses don't reach it, and of updates those of an average alone.
    """

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        tokenizer: PreTrainedTokenizerBase,
        held: Mapping[str, Engine] | None = None,
    ) -> None:
        self.is_ready = False
        self.has_failed = self._is_paused = False
        self._engine = engine
        self._model_name = model_name
        self._engines = {model_name: engine, **(held or {})}
        self._average = self._engines.get(held_name(model_name, "ema"))
        self._tokenizer = tokenizer

    def fail(self) -> None:
        """Answer no more: an engine can't go on."""
        self.is_ready, self.has_failed = False, True

    async def load_weights(self, version: int, folder: Path) -> None:
        """Answer later requests by a broadcast's weights. Raises BadInput, and all stay, when it has too few."""
        if self._average is not None:  # first: the policy's version says that all is there
            await self._average.load_weights(folder / AVERAGE, version)
        await self._engine.load_weights(folder, version)
        logger.info("policy_version=%d weight_dir=%s", version, folder)

    def app(self, lifespan: Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]) -> Starlette:
        """The routes of the policy server."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._answering(self._models)),
                Route("/v1/chat/completions", self._answering(self._chat), methods=["POST"]),
                Route("/inference/v1/generate", self._answering(self._generate), methods=["POST"]),
                Route("/tokenize", self._answering(self._tokenize), methods=["POST"]),
                Route("/detokenize", self._answering(self._detokenize), methods=["POST"]),
                Route("/update_weights", self._answering(self._update_weights), methods=["POST"]),
                Route("/pause", self._answering(self._pause), methods=["POST"]),
                Route("/resume", self._answering(self._resume), methods=["POST"]),
            ],
            lifespan=lifespan,
        )

    def _answering(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler with our errors turned into statuses."""

        async def answer(request: Request) -> Response:
            if not self.is_ready:
                return _error(503, "the engine is starting: wait until /health answers 200")
            try:
                return await handle(request)
            except BadInput as error:
                return _error(400, str(error))
            except ClientDisconnect:
                return _error(400, "the request ended before its body was complete: send it again")  # nobody reads it
            except SiteError as error:
                logger.error("path=%s error=%s", request.url.path, error)
                return _error(500, str(error))
            except asyncio.CancelledError:  # only uvicorn cancels, when it has waited long enough for us to end
                return _error(503, "the server has ended before its answer was complete: ask another one")

        return answer

    async def _health(self, request: Request) -> Response:
        status = ("paused" if self._is_paused else "ready") if self.is_ready else "starting"
        state = {"status": status, "policy_version": self._engine.policy_version}
        return JSONResponse(state, status_code=200 if self.is_ready else 503)

    async def _models(self, request: Request) -> Response:
        cards = [
            {"id": name, "object": "model", "owned_by": "composer-prime", "max_model_len": engine.max_model_len}
            for name, engine in self._engines.items()
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _generate(self, request: Request) -> Response:
        body = await _body(request)
        engine = self._engine_of(body)
        asked = wire.parse_generate(body, secrets.token_hex(8))
        completion = await engine.generate(asked)
        return _versioned(wire.generate_answer(completion), completion)

    async def _chat(self, request: Request) -> Response:
        body = await _body(request)
        engine = self._engine_of(body)
        asked = wire.parse_chat(body, f"chatcmpl-{secrets.token_hex(8)}", self._render)
        completion = await engine.generate(asked)
        name = body.get("model") or self._model_name
        answer = wire.chat_answer(asked, completion, name, self._decode, bool(body.get("logprobs")))
        return _versioned(answer, completion)

    async def _tokenize(self, request: Request) -> Response:
        body = await _body(request)
        self._engine_of(body)
        text, around = wire.parse_tokenize(body)
        token_ids = self._tokenizer.encode(text, add_special_tokens=around)
        limit = self._engine.max_model_len
        return JSONResponse({"count": len(token_ids), "max_model_len": limit, "tokens": token_ids})

    async def _detokenize(self, request: Request) -> Response:
        body = await _body(request)
        self._engine_of(body)
        token_ids = wire.parse_detokenize(body)
        if max(token_ids) >= len(self._tokenizer):
            raise BadInput(f"tokens ({max(token_ids)}) must be below the tokenizer's size ({len(self._tokenizer)})")
        return JSONResponse({"prompt": self._tokenizer.decode(list(token_ids))})

    async def _update_weights(self, request: Request) -> Response:
        folder, version = wire.parse_update(await _body(request))
        await self.load_weights(version, Path(folder))
        return JSONResponse({"status": "ok", "policy_version": version})

    async def _pause(self, request: Request) -> Response:
        self._is_paused = True
        await self._engine.pause()
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self._is_paused = False
        await self._engine.resume()
        return JSONResponse({"status": "ok"})

    def _engine_of(self, body: Any) -> Engine:
        """The engine that a body asks for by `model`; the policy's where it names none. Raises BadInput."""
        model = body.get("model") if isinstance(body, dict) else None
        engine = self._engine if model is None else self._engines.get(str(model))
        if engine is None:
            raise BadInput(f"model ({model}) isn't served here: ask for {' or '.join(self._engines)}")
        return engine

    def _render(self, messages: list[Any], tools: list[Any] | None, options: dict[str, Any]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise BadInput("this model's tokenizer has no chat template: use /inference/v1/generate")
        try:
            text = render_chat(self._tokenizer, messages, tools=tools, **options)
        # What a template does to messages it isn't made for.
        except (TemplateError, TypeError, ValueError, TimeoutError, RecursionError) as error:
            raise BadInput(f"messages don't fit the model's chat template: {error}") from error
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[Any], **options: Any) -> str:
    """The chat with its generation prompt. Raises TimeoutError after TEMPLATE_S, else what the template raises.

    The clock is looked at on each of its lines and at each call: a single operation without an end isn't ended.
    """
    until, before = time.thread_time() + TEMPLATE_S, sys.gettrace()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > until:
            raise TimeoutError(f"it takes more than {TEMPLATE_S:g} s")
        return watch if frame.f_code.co_filename == "<template>" else None

    sys.settrace(watch)
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options))
    finally:
        sys.settrace(before)


async def _body(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except ValueError as error:
        raise BadInput(f"body isn't JSON: {error}") from error


def _versioned(answer: dict[str, Any], completion: Completion) -> Response:
    return JSONResponse(answer, headers={VERSION_HEADER: str(completion.policy_version)})


def _error(status: int, message: str) -> Response:
    kind = "invalid_request_error" if status == 400 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)
