"""The embedded inference server with a real model, on a loopback port in a thread."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from starlette.applications import Starlette

from composer_prime.config.teachers import HintTeacher
from composer_prime.sites.embedded.inference.app import Server
from composer_prime.sites.embedded.inference.serve import load_tokenizer
from composer_prime.sites.embedded.inference.transformers_engine import TransformersEngine
from composer_prime.teachers.served import held_name
from tests.servers.in_thread import serving_app


@contextmanager
def serving_policy(
    folder: Path, *, name: str = "policy", max_model_len: int = 512, held: Mapping[HintTeacher, Path] | None = None
) -> Iterator[int]:
    """Serve the model in a folder, and others as hints' teachers; the port is yielded once all answer."""
    failures: list[BaseException] = []
    folders = {name: folder} | {held_name(name, teacher): path for teacher, path in (held or {}).items()}
    engines = {
        one: TransformersEngine(
            path, seed=0, max_batch_size=32, max_model_len=max_model_len, on_failure=failures.append
        )
        for one, path in folders.items()
    }
    server = Server(engines[name], name, load_tokenizer(folder), engines)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for engine in engines.values():
            await engine.start()
        server.is_ready = True
        try:
            yield
        finally:
            for engine in engines.values():
                await engine.close()

    with serving_app(server.app(lifespan), lifespan="on") as port:
        yield port
    assert not failures
