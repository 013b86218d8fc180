"""A stand-in for a teacher's server, on loopback in a thread: vLLM's routes, and whatever goes wrong with one.

Its logprobs are a function of the token and its place, so that a test knows them; its tokenizer is the tiny model's,
or another.
"""

import asyncio
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.servers.in_thread import serving_app
from tiny_policy.qwen3 import tiny_tokenizer

FIRST_OTHER = 100
"""The least id of the tokens that it names beside the one that stands there; all are of the tiny tokenizer's."""


def told_logprob(place: int, token: int) -> float:
    """What the fake says of a token at a place."""
    return -0.125 * (1 + (place + token) % 16)


@dataclass
class FakeTeacher:
    """What the server does, and what it saw; all may be set while it serves.

    logprob     what it says of (place, token)
    hold        called on each scoring request before the answer; it may wait
    statuses    answers to the next scoring requests instead of 200, taken from the front
    change      changes the JSON of a scoring answer, or gives another answer
    completions whether it has /v1/completions; generate alike
    decode      what it answers /detokenize with, given the true text; None: no such route
    cards       what /v1/models lists; None: the one model
    key         the Authorization header it wants
    max_logprobs  the most it gives a token besides its own
    is_scaled     whether its numbers are those of the request's temperature
    """

    model: str = "fake"
    logprob: Callable[[int, int], float] = told_logprob
    hold: Callable[[], Any] | None = None
    statuses: list[int] = field(default_factory=list)
    change: Callable[[dict[str, Any]], Any] = lambda answer: answer
    completions: bool = True
    generate: bool = True
    decode: Callable[[str], str] | None = lambda text: text
    cards: Any = None
    key: str | None = None
    max_logprobs: int = 64
    is_scaled: bool = False

    requests: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of the scoring requests."""

    def entries(self, token_ids: Sequence[int], body: dict[str, Any]) -> list[Any]:
        """vLLM's prompt_logprobs: the token's own, and as many others as are asked for, each half as likely as the one
        before it."""
        k = min(body["prompt_logprobs"], self.max_logprobs)
        scored = []
        for place, token in enumerate(token_ids):
            own = self.logprob(place, token) / (body["temperature"] if self.is_scaled else 1.0)
            left = math.log1p(-math.exp(own))
            ids = [one for one in range(FIRST_OTHER, FIRST_OTHER + k + 1) if one != token][:k]
            others = {str(one): {"logprob": left - (rank + 1) * math.log(2)} for rank, one in enumerate(ids)}
            scored.append({str(token): {"logprob": own}, **others})
        return [None, *scored[1:]]


@contextmanager
def serving_teacher(teacher: FakeTeacher) -> Iterator[str]:
    """Serve it on a free loopback port; its base URL is yielded."""
    with serving_app(_app(teacher)) as port:
        yield f"http://127.0.0.1:{port}"


def _app(teacher: FakeTeacher) -> Starlette:
    tokenizer = tiny_tokenizer()

    async def score(request: Request) -> Response:
        path, body = request.url.path, await request.json()
        teacher.requests[path] += 1
        if not (teacher.completions if path == "/v1/completions" else teacher.generate):
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        teacher.bodies.append(body)
        if teacher.statuses:
            return JSONResponse({"error": {"message": "the test said so"}}, status_code=teacher.statuses.pop(0))
        if teacher.hold is not None:
            await teacher.hold()
        if path == "/v1/completions":
            answer = {"choices": [{"text": "", "prompt_logprobs": teacher.entries(body["prompt"], body)}]}
        else:
            entries = teacher.entries(body["token_ids"], body["sampling_params"])
            answer = {"choices": [{"token_ids": [0]}], "prompt_logprobs": entries}
        # Not Starlette's JSONResponse, which refuses the NaN that Python's json writes and reads.
        changed = teacher.change(answer)
        if isinstance(changed, Response):
            return changed
        return Response(json.dumps(changed), media_type="application/json")

    async def models(request: Request) -> Response:
        teacher.requests["/v1/models"] += 1
        if teacher.key is not None and request.headers.get("authorization") != teacher.key:
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        cards = [{"id": teacher.model, "max_model_len": 4096}] if teacher.cards is None else teacher.cards
        return JSONResponse({"data": cards})

    async def tokenize(request: Request) -> Response:
        body = await request.json()
        return JSONResponse({"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False)})

    async def detokenize(request: Request) -> Response:
        if teacher.decode is None:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        body = await request.json()
        return JSONResponse({"prompt": teacher.decode(str(tokenizer.decode(body["tokens"])))})

    return Starlette(
        routes=[
            Route("/v1/completions", score, methods=["POST"]),
            Route("/inference/v1/generate", score, methods=["POST"]),
            Route("/v1/models", models),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
        ]
    )


def meeting(parties: int) -> Callable[[], Any]:
    """A `hold` under which nobody is answered before so many requests are there, at whichever servers."""
    barrier = threading.Barrier(parties)
    return lambda: asyncio.to_thread(barrier.wait, 30)
