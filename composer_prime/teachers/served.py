"""One served model, asked over HTTP: its name and context, the logprobs of given tokens, its tokenizer's answers.

A request that meets a passing fault is tried again a bounded number of times; who waits decides how long.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from composer_prime import bearer
from composer_prime.bearer import is_local
from composer_prime.config.teachers import HintTeacher
from composer_prime.errors import TeacherError
from composer_prime.teachers.wire import (
    MOST_IDS,
    ROUTES,
    NotSampled,
    Route,
    Scores,
    num_candidates,
    read_sample,
    read_scores,
    sample_body,
    score_body,
)

TRIES = 3
"""Requests sent for one answer at most."""

RETRY_WAIT_S = 0.2
"""Before the second try; doubled before the third."""

HOT = 2.0
"""Temperature of the request by which a server is found out that scales prompt logprobs."""

SAME = 0.05
"""Nats by which two scores of a token may differ in the mean: a bf16 server batches requests differently, and a few
tokens may move by far more."""

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_ABSENT = frozenset({404, 405, 501})


def held_name(model: str, teacher: HintTeacher) -> str:
    """The name under which an embedded site serves hints' teacher beside the policy that learns."""
    return f"{model}@{teacher}"


class ServedModel:
    """A model at `base_url` (the server's root). `close` it in the end.

    model    the name it is served under; None: the first the server lists.
    headers  sent with every request; None: the token of this user's own teachers where it is on this machine.

    Every method raises TeacherError with the cause when there is no usable answer. None has a time-out of its own.
    """

    def __init__(self, base_url: str, *, model: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url
        self.model = model
        self.max_model_len: int | None = None
        self.route: Route | None = None
        if headers is None and is_local(base_url):
            headers = bearer.headers(bearer.user_token())
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=dict(headers or {}),
            timeout=None,
            limits=httpx.Limits(max_connections=None),
            trust_env=not is_local(base_url),  # a proxy has no way to this machine's own servers
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def find(self) -> None:
        """Learn the model's name and the tokens its context has, and by which route it gives prompt logprobs."""
        cards = _field(await self._ask("GET", "/v1/models"), "data", list, "/v1/models")
        known = {card["id"]: card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)}
        if not known:
            raise TeacherError(f"{self.base_url} serves no model")
        name = self.model or next(iter(known))
        if name not in known:
            raise TeacherError(f"{self.base_url} doesn't serve {name}, but {', '.join(sorted(known))}")
        self.model = name
        length = known[name].get("max_model_len")
        self.max_model_len = length if isinstance(length, int) else None
        self.route = await self._find_route()

    async def scores(
        self, token_ids: Sequence[int], k: int = 0, num_ids: int = MOST_IDS, *, temperature: float = 1.0
    ) -> Scores:
        """What the model says to a token sequence, with its k likeliest tokens at each place.

        num_ids      of the policy's vocabulary: candidates with other ids are left out.
        temperature  of the request, which must make no difference: see `check_scores`.
        """
        if self.route is None:
            await self.find()
        assert self.route is not None and self.model is not None  # find has set both
        body = score_body(self.route, self.model, token_ids, k, temperature=temperature)
        return read_scores(self.route, await self._ask("POST", self.route, body), token_ids, k, num_ids)

    async def check_scores(self, token_ids: Sequence[int], k: int) -> None:
        """Raise TeacherError unless it gives k candidates a token, by a temperature that no request changes.

        token_ids  two at least, of its vocabulary; such that not all tokens are equally likely after them.
        """
        plain = await self.scores(token_ids, k)
        heated = await self.scores(token_ids, k, temperature=HOT)
        moves = [abs(one - other) for one, other in zip(plain.logprobs[1:], heated.logprobs[1:], strict=True)]
        moved = sum(moves) / len(moves)
        if math.isnan(moved):
            raise TeacherError("its prompt logprobs lack a number for some tried tokens: look for NaN in its weights")
        if (found := num_candidates(plain.candidates)) < k:
            raise TeacherError(
                f"it gives {found} logprobs a token, and top_k ({k}) are wanted: start its server with "
                f"--max-logprobs {k}, or lower top_k"
            )
        if moved > SAME:
            raise TeacherError(
                f"its prompt logprobs change with the request's temperature (by {moved:.3g} nats a token between 1 and "
                f"{HOT:g}): serve it so that they are those of temperature 1"
            )

    async def sample(
        self, token_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int], temperature: float
    ) -> list[int]:
        """What the model says after a token sequence, as token ids, the one that stopped it included.

        Raises NotSampled where the server gives none.
        """
        if self.route is None:
            await self.find()
        assert self.route is not None and self.model is not None  # find has set both
        room = max_tokens if self.max_model_len is None else min(max_tokens, self.max_model_len - len(token_ids))
        body = sample_body(self.route, self.model, token_ids, room, stop_token_ids, temperature)
        try:
            return read_sample(self.route, await self._ask("POST", self.route, body))
        except _Refused as error:
            raise NotSampled(str(error)) from error

    async def reply(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> str:
        """What the model says to a conversation, at temperature 0; by `/v1/chat/completions`."""
        path = "/v1/chat/completions"
        body = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
        choices = _field(await self._ask("POST", path, body), "choices", list, path)
        message = choices[0].get("message") if choices and isinstance(choices[0], dict) else None
        return _field(message if isinstance(message, dict) else {}, "content", str, path)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens shown."""
        answer = await self._ask("POST", "/detokenize", {"model": self.model, "tokens": list(token_ids)})
        return _field(answer, "prompt", str, "/detokenize")

    async def encode(self, text: str) -> list[int]:
        """The token ids of a text, without any that a model puts before or after."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return _field(await self._ask("POST", "/tokenize", body), "tokens", list, "/tokenize")

    async def _find_route(self) -> Route:
        for route in ROUTES:
            try:
                answer = await self._ask("POST", route, score_body(route, self.model or "", [0, 0]))
            except _Absent:
                continue
            if math.isnan(read_scores(route, answer, [0, 0]).logprobs[1]):
                raise TeacherError(f"the prompt_logprobs of {route} lack the prompt's own tokens")
            return route
        raise TeacherError(f"{self.base_url} answers neither {' nor '.join(ROUTES)}")

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One JSON object, after at most `TRIES` requests."""
        for attempt in range(TRIES):
            try:
                answer = await self._http.request(method, path, json=body)
            except (httpx.TransportError, httpx.DecodingError) as error:
                failure = f"{self.base_url} can't be reached: {type(error).__name__}: {error}".rstrip(": ")
            else:
                if answer.status_code not in _PASSING:
                    return self._read(path, answer)
                failure = f"{self.base_url} answered {path} with {answer.status_code}: {_excerpt(answer)}"
            if attempt + 1 < TRIES:
                await asyncio.sleep(RETRY_WAIT_S * 2**attempt)
        raise TeacherError(failure)

    def _read(self, path: str, answer: httpx.Response) -> dict[str, Any]:
        if answer.status_code in _ABSENT:
            raise _Absent(f"{self.base_url} has no {path} ({answer.status_code})")
        if not answer.is_success:
            raise _Refused(f"{self.base_url} refused {path} with {answer.status_code}: {_excerpt(answer)}")
        try:
            found = answer.json()
        except (ValueError, RecursionError) as error:
            raise TeacherError(f"{self.base_url} answered {path} with something that isn't JSON: {error}") from error
        if not isinstance(found, dict):
            raise TeacherError(f"{self.base_url} answered {path} with a {type(found).__name__}, not an object")
        return found


class _Absent(TeacherError):
    """The server has no such route."""


class _Refused(TeacherError):
    """The server doesn't do what it was asked for."""


def _field(answer: dict[str, Any], name: str, kind: type, path: str) -> Any:
    if not isinstance(answer.get(name), kind):
        raise TeacherError(f"the answer of {path} has no {name}")
    return answer[name]


def _excerpt(answer: httpx.Response) -> str:
    """The error's message on one line."""
    return " ".join(answer.text.split())[:300] or answer.reason_phrase
