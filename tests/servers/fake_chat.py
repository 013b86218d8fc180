"""A stand-in for any server with OpenAI's chat completions, on loopback in a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.servers.in_thread import serving_app


@dataclass
class FakeChat:
    """What it says to everybody, and what it saw. status other than 200: it refuses so."""

    says: str = "ask for the name first"
    status: int = 200
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def serving_chat(chat: FakeChat) -> Iterator[int]:
    """Serve it on a free loopback port, which is yielded."""

    async def complete(request: Request) -> JSONResponse:
        if chat.key is not None and request.headers.get("authorization") != f"Bearer {chat.key}":
            return JSONResponse({"error": {"message": "no key"}}, status_code=401)
        if chat.status != 200:
            return JSONResponse({"error": {"message": "no"}}, status_code=chat.status)
        chat.bodies.append(await request.json())
        message = {"role": "assistant", "content": chat.says}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    with serving_app(Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])) as port:
        yield port
