"""The embedded inference server with a real model, on a loopback port in a thread."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.applications import Starlette

from composer_prime.sites.embedded.inference.app import Server
from composer_prime.sites.embedded.inference.serve import load_tokenizer
from composer_prime.sites.embedded.inference.transformers_engine import TransformersEngine
from tests.servers.in_thread import serving_app


@contextmanager
def serving_policy(folder: Path, *, name: str = "policy", max_model_len: int = 512) -> Iterator[int]:
    """Serve the model in a folder; the port is yielded once it answers."""
    failures: list[BaseException] = []
    engine = TransformersEngine(
        folder, seed=0, max_batch_size=32, max_model_len=max_model_len, on_failure=failures.append
    )
    server = Server(engine, name, load_tokenizer(folder))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await engine.start()
        server.is_ready = True
        try:
            yield
        finally:
            await engine.close()

    with serving_app(server.app(lifespan), lifespan="on") as port:
        yield port
    assert not failures
