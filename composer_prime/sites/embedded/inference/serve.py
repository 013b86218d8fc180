"""Runs the server of one site: the engine its recipe names behind uvicorn, until a signal or a failure ends both."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from composer_prime.config.settings import SiteSettings
from composer_prime.errors import ModelError
from composer_prime.sites.embedded.inference.app import Server
from composer_prime.sites.embedded.inference.engine import Engine

_GRACE_S = 0.5  # for answers that are being written; requests that still run then fail
_KEEP_ALIVE_S = 300  # longer than any client keeps a connection, so that none is closed under a request


def serve(settings: SiteSettings, listener: socket.socket) -> None:
    """Answer on `listener` until SIGTERM or SIGINT, whose own handlers then run.

    Raises ModelError for a model that can't be loaded, and whatever else ended the engine.
    """
    asyncio.run(_serve(settings, listener))


async def _serve(settings: SiteSettings, listener: socket.socket) -> None:
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        server.is_ready = False
        http.should_exit = True

    engine = make_engine(settings, fail)
    server = Server(engine, settings.recipe.model.name, load_tokenizer(settings.model_dir))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(_start(engine, server, fail))
        try:
            yield
        finally:
            starting.cancel()
            await engine.close()

    config = uvicorn.Config(
        server.app(lifespan),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,  # pyright: ignore[reportArgumentType] (asyncio takes any number)
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    http = uvicorn.Server(config)
    await http.serve(sockets=[listener])
    if failures:
        raise failures[0]


async def _start(engine: Engine, server: Server, fail: Callable[[BaseException], None]) -> None:
    try:
        await engine.start()
    except Exception as error:  # the border of a task: `serve` raises it
        fail(error)
    else:
        server.is_ready = True


def make_engine(settings: SiteSettings, on_failure: Callable[[BaseException], None]) -> Engine:
    """The engine that `inference.engine` names, not started."""
    inference = settings.recipe.inference
    if inference.engine == "vllm":
        from composer_prime.sites.embedded.inference.vllm_engine import VllmEngine

        return VllmEngine(
            settings.model_dir,
            python=inference.python,
            log=settings.paths.log("vllm"),
            seed=settings.sampling_seed,
            max_batch_size=inference.max_batch_size,
            max_model_len=settings.recipe.seq_len,
            on_failure=on_failure,
        )
    from composer_prime.sites.embedded.inference.transformers_engine import TransformersEngine

    return TransformersEngine(
        settings.model_dir,
        seed=settings.sampling_seed,
        max_batch_size=inference.max_batch_size,
        max_model_len=settings.recipe.seq_len,
        on_failure=on_failure,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model folder. Raises ModelError when its files can't be read as one."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"tokenizer in {folder} can't be loaded: {error}; save it there again") from error
