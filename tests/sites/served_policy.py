"""The embedded inference server with a real model, on a loopback port in a thread."""

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from composer_prime.sites.embedded.inference.app import Server
from composer_prime.sites.embedded.inference.serve import load_tokenizer
from composer_prime.sites.embedded.inference.transformers_engine import TransformersEngine


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

    http = uvicorn.Server(uvicorn.Config(server.app(lifespan), host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        while not http.started:
            assert thread.is_alive(), "the policy's server did not start"
            time.sleep(0.01)
        yield http.servers[0].sockets[0].getsockname()[1]
    finally:
        http.should_exit = http.force_exit = True
        thread.join()
    assert not failures
