"""Runs a server: the engine that a site's recipe names, or a teacher's, behind uvicorn until a signal or failure."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from composer_prime.bearer import OnlyWithToken, site_token, user_token
from composer_prime.config.model_folder import loading
from composer_prime.config.settings import SiteSettings
from composer_prime.config.teachers import HintTeacher
from composer_prime.errors import ModelError
from composer_prime.sites.embedded.inference.app import Server, render_chat
from composer_prime.sites.embedded.inference.engine import Engine
from composer_prime.sites.embedded.inference_client import newest_broadcast
from composer_prime.teachers.served import held_name

_Fail = Callable[[BaseException], None]
_Newest = Callable[[], tuple[int, Path] | None]

_GRACE_S = 0.5  # for answers that are being written; requests that still run then fail
_TEACHER_BATCH = 64
_KEEP_ALIVE_S = 300  # longer than any client keeps a connection, so that none is closed under a request


def serve(settings: SiteSettings, listener: socket.socket) -> None:
    """Answer on `listener`, with the site's token, until SIGTERM or SIGINT, whose own handlers then run.

    Raises ModelError for a model that can't be loaded, and whatever else ended the engine.
    """
    asyncio.run(
        _serve(
            lambda fail: make_engine(settings, fail),
            settings.recipe.model.name,
            settings.model_dir,
            listener,
            site_token(),
            lambda fail: make_teacher(settings, fail),
            partial(newest_broadcast, settings.paths, settings.paths.settings.stat().st_mtime),
        )
    )


def serve_teacher(
    folder: Path,
    name: str,
    listener: socket.socket,
    *,
    max_model_len: int,
    weights: Path | None,
    device: str = "cpu",
    is_permuted: bool = False,
) -> None:
    """As `serve`, with the user's token, for a model that only scores what others sampled.

    folder       the model's; `weights` is a folder of safetensors that take the place of its own.
    name         under which it is served.
    device       where it is, in torch's word.
    is_permuted  as `TransformersEngine` takes it.

    Raises BadInput when the weights aren't this model's.
    """
    asyncio.run(
        _serve(
            lambda fail: _scoring_engine(folder, max_model_len, fail, device=device, is_permuted=is_permuted),
            name,
            folder,
            listener,
            user_token(),
            newest=lambda: None if weights is None else (0, weights),
        )
    )


def _scoring_engine(
    folder: Path, max_model_len: int, fail: _Fail, num_threads: int = 1, *, device: str, is_permuted: bool = False
) -> Engine:
    """For a model that scores what others sampled."""
    from composer_prime.sites.embedded.inference.transformers_engine import TransformersEngine

    return TransformersEngine(
        folder,
        seed=0,
        max_batch_size=_TEACHER_BATCH,
        max_model_len=max_model_len,
        on_failure=fail,
        num_threads=num_threads,
        device=device,
        is_permuted=is_permuted,
    )


async def _serve(
    make: Callable[[_Fail], Engine],
    model_name: str,
    folder: Path,
    listener: socket.socket,
    token: str,
    make_held: Callable[[_Fail], Mapping[str, Engine]] = lambda fail: {},
    newest: _Newest = lambda: None,
) -> None:
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        server.fail()
        http.should_exit = True

    engine = make(fail)
    held = make_held(fail)
    engines = [engine, *held.values()]
    server = Server(engine, model_name, load_tokenizer(folder), held)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(start_engines(engines, server, newest, fail))
        try:
            yield
        finally:
            starting.cancel()
            await close_engines(engines)

    config = uvicorn.Config(
        OnlyWithToken(server.app(lifespan), token),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,  # pyright: ignore[reportArgumentType] (asyncio takes any number)
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    http = uvicorn.Server(config)
    await http.serve(sockets=[listener])
    if failures:
        raise failures[0]


async def start_engines(engines: Sequence[Engine], server: Server, newest: _Newest, fail: _Fail) -> None:
    """Start all, and say that the server is ready unless one has failed by then.

    newest  version and folder of the weights that take the place of the model's, as a server that is started again has
            them from its first answer on.
    """
    try:
        for engine in engines:
            await engine.start()
        if (weights := newest()) is not None:
            await server.load_weights(*weights)
    except Exception as error:  # the border of a task: `serve` raises it
        fail(error)
    else:
        server.is_ready = not server.has_failed


async def close_engines(engines: Sequence[Engine]) -> None:
    """Close all, then raise what the first of those that failed at it raised."""
    for outcome in await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True):
        if outcome is not None:
            raise outcome


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
        num_threads=settings.recipe.site.threads,
        device=settings.recipe.site.device,
    )


def make_teacher(settings: SiteSettings, on_failure: Callable[[BaseException], None]) -> dict[str, Engine]:
    """The engines of hints' teacher and of DPO's reference by the names they are asked for under, not started; none
    where the policy is the only model.

    They start with the model's own weights. Raises ModelError when these are the first policy's, and aren't here.
    """
    recipe, model = settings.recipe, settings.recipe.model.name
    if recipe.holds_first_policy and not settings.has_weights:
        raise ModelError(
            f"hints and replay.pairs need the first policy, and model {model} is here without its weights: download it "
            f"first, `hf download {model}`, or give hints.base_url"
        )
    held: set[HintTeacher] = {"frozen"} if recipe.holds_first_policy else set()
    if recipe.hints is not None and recipe.hints.is_held:
        held.add(recipe.hints.teacher)
    site, length = recipe.site, recipe.seq_len
    return {
        held_name(model, name): _scoring_engine(
            settings.model_dir, length, on_failure, site.threads, device=site.device
        )
        for name in held
    }


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model folder. Raises ModelError when its files can't be read as one."""
    with loading(f"tokenizer in {folder}", "save it there again"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    try:
        render_chat(tokenizer, [{"role": "user", "content": "?"}])
    except TimeoutError as error:
        raise ModelError(f"the chat template in {folder} doesn't end: {error}; save another one there") from None
    except Exception:  # it may want other messages: whoever sends them is told
        pass
    return tokenizer
