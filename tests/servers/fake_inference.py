"""A stand-in for a site's inference server, on loopback in a thread: the real routes, and dice for a policy.

It solves the letters tasks with a seeded probability, so that tests of the orchestrator need no model and no torch.
Weights mean nothing to it, but `/update_weights` moves the version that its later answers carry.
"""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.servers.in_thread import serving_app
from tiny_policy.qwen3 import tiny_config, tiny_tokenizer

END_OF_TURN = 258
LOGPROB = -0.25
_TASK = re.compile(r"(Reverse|Sort): ([a-z]+)")
_SOLVE: dict[str, Callable[[str], str]] = {
    "Reverse": lambda word: word[::-1],
    "Sort": lambda word: "".join(sorted(word)),
}


@dataclass
class FakePolicy:
    """What the server does, and what it saw. The first seven may be set while it serves.

    reply      says what is answered to a prompt's text; None: the letters tasks are solved by dice.
    accuracy   probability that the answer to a word is right. The dice depend on the word and how often it came, not
               on the order in which requests arrive.
    failing    probability that a generation is answered with HTTP 500, thrown alike.
    is_open    generation waits while this is false.
    refusing   new weights are answered with HTTP 503.
    status     what /health says it is.
    """

    accuracy: Callable[[str], float] = lambda word: 0.5
    reply: Callable[[str], str] | None = None
    failing: float = 0.0
    seed: int = 0
    is_open: bool = True
    refusing: bool = False
    status: str = "ready"

    version: int = 0
    updates: list[tuple[int, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """The words asked for, in order of arrival."""
    num_right: int = 0
    num_failed: int = 0

    def answer(self, verb: str, word: str) -> str | None:
        """The reply to one task; None when this generation is to fail."""
        dice = random.Random(f"{self.seed}/{word}/{Counter(self.words)[word]}")
        self.words.append(word)
        if dice.random() < self.failing:
            self.num_failed += 1
            return None
        if dice.random() >= self.accuracy(word):
            return "no"
        self.num_right += 1
        return _SOLVE[verb](word)


def save_tokenizer(folder: Path) -> Path:
    """Make `folder` look like the tiny model's to the orchestrator, which reads the tokenizer and no weights."""
    tiny_config().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def serving(policy: FakePolicy) -> Iterator[int]:
    """Serve the policy on a free loopback port, which is yielded."""
    with serving_app(_app(policy)) as port:
        yield port


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "server_error", "code": status}}, status_code=status)


def _app(policy: FakePolicy) -> Starlette:
    tokenizer = tiny_tokenizer()

    async def generate(request: Request) -> JSONResponse:
        asked = await request.json()
        prompt = str(tokenizer.decode(asked["token_ids"]))
        if policy.reply is not None:
            text = policy.reply(prompt)
        else:
            found = _TASK.search(prompt)
            assert found is not None, "the prompt holds no letters task"
            text = policy.answer(*found.groups())
        while not policy.is_open:
            await asyncio.sleep(0.005)
        if text is None:
            return _error(500, "the dice said so")
        ids = [*tokenizer.encode(text), END_OF_TURN][: asked["sampling_params"]["max_tokens"]]
        content = [{"token": f"token_id:{i}", "token_id": i, "logprob": LOGPROB} for i in ids]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}
        return JSONResponse({"request_id": "fake", "policy_version": policy.version, "choices": [choice]})

    async def update_weights(request: Request) -> JSONResponse:
        if policy.refusing:
            return _error(503, "busy")
        asked = await request.json()
        policy.version = asked["version"]
        policy.updates.append((asked["version"], asked["weight_dir"]))
        return JSONResponse({"policy_version": policy.version})

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": 512}]})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": policy.status, "policy_version": policy.version})

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/inference/v1/generate", generate, methods=["POST"]),
            Route("/update_weights", update_weights, methods=["POST"]),
        ]
    )
