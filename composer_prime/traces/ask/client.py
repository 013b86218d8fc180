"""One request to a server with OpenAI's chat completions, and what became of it: an answer, a refusal, or nobody knows.

The difference is money: what was refused costs nothing, what was lost may have been paid for.
"""

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from composer_prime.bearer import is_local
from composer_prime.errors import BadInput
from composer_prime.redaction import Redactor
from composer_prime.traces.ask.pace import asked_pause

PATH = "/v1/chat/completions"

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol)
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_BEHIND_A_GATEWAY = frozenset({408, 502, 504})
"""With these a gateway gave up; the model behind it may have answered, and been paid."""
_NO_ENTRY = frozenset({401, 402, 403, 404, 405})
"""With these every other question has the same end: a key, a bill, a path or a model's name is wrong."""
_TOO_LONG = ("context length", "context_length", "context window", "too long", "too many tokens")
"""Words that say a refusal is about this prompt, also where it names max_tokens."""
_LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
_OURS = frozenset({*_LIMITS, "temperature", "reasoning_effort"})
"""Settings that a refusal may name without quotes."""


@dataclass(frozen=True)
class Reply:
    """What became of one request.

    answer         the JSON of a 200, whatever it is; None with a 200 whose text isn't JSON
    why            there is no 200; None: there is
    is_lost        the server may have answered and charged for it
    is_passing     another try may do
    is_too_fast    the server wants fewer requests
    is_about_this  the server takes others, but not this question
    is_final       the server takes no question as we send them
    pause_s        the server wants so long a pause
    """

    answer: Any = None
    why: str | None = None
    is_lost: bool = False
    is_passing: bool = False
    is_too_fast: bool = False
    is_about_this: bool = False
    is_final: bool = False
    pause_s: float | None = None


class ChatClient:
    """Sends requests to one server. `close` it in the end.

    key_var  the environment variable with the server's key
    more     headers; "$NAME" is the value of that environment variable

    Raises BadInput when a variable is named and not set.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float,
        key_var: str | None = None,
        more: Mapping[str, str] | None = None,
        path: str = PATH,
    ) -> None:
        keys = [] if key_var is None else [_value(key_var, "api_key_var", base_url)]
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        for name, value in (more or {}).items():
            headers[name] = _value(value[1:], f"headers.{name}", base_url) if value.startswith("$") else value
        self.base_url, self._timeout_s, self._path = base_url, timeout_s, path
        self._hidden = Redactor([*keys, *headers.values()])
        self.http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not is_local(base_url),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def complete(self, body: bytes, call: str = "") -> Reply:
        """Send one chat completion's request, once. `call` is its X-Request-Id, and its Idempotency-Key."""
        headers = {"Content-Type": "application/json"}
        if call:
            headers |= {"X-Request-Id": call, "Idempotency-Key": call}
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self.http.post(self._path, content=body, headers=headers)
        except _NEVER_SENT as error:
            return Reply(why=f"{self.base_url} can't be reached: {named(error)}", is_passing=True)
        except TimeoutError:
            return Reply(why=f"no answer within timeout_s ({self._timeout_s:g})", is_lost=True, is_passing=True)
        except (httpx.TransportError, httpx.DecodingError) as error:
            return Reply(why=f"the answer was lost: {named(error)}", is_lost=True, is_passing=True)
        return self.read(answer, body)

    async def cost_of(self, call: str, usage_url: str) -> Any:
        """What the provider tells about a call: {"cost": dollars or null}; None: nothing."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self.http.get(usage_url, params={"key": call})
            return answer.raise_for_status().json()
        except (httpx.HTTPError, TimeoutError, ValueError, RecursionError):
            return None

    def read(self, answer: httpx.Response, body: bytes) -> Reply:
        """What a response says to the request with this body."""
        status, pause_s = answer.status_code, asked_pause(answer.headers)
        if answer.is_success:
            try:
                return Reply(answer.json(), pause_s=pause_s)
            except (ValueError, RecursionError):
                return Reply(None)
        codes, text = _error(answer)
        why = self._hidden.text(f"{status}: {text}")
        is_about_this, has_no_quota = status in (400, 413, 422), "insufficient_quota" in codes
        if is_about_this and (remedy := _remedy(codes, text, body)) is not None:
            return Reply(why=f"{why}: {remedy}", is_final=True)
        return Reply(
            why=why,
            is_lost=status in _BEHIND_A_GATEWAY,
            is_passing=status in _PASSING,
            is_too_fast=status == 429 and not has_no_quota,
            is_about_this=is_about_this,
            is_final=status in _NO_ENTRY or has_no_quota,
            pause_s=pause_s,
        )


def _value(variable: str, setting: str, base_url: str) -> str:
    if not (value := os.environ.get(variable)):
        raise BadInput(f"{setting} ({variable}) isn't set: export the key of {base_url} in it")
    return value


def _error(answer: httpx.Response) -> tuple[set[str], str]:
    """The error's code and parameter, as far as it has some, and its own words on one line."""
    codes, text = set[str](), answer.text
    try:
        error = json.loads(answer.text)["error"]
        text = error["message"] if isinstance(error, dict) else error
        codes = {str(error.get(field)) for field in ("code", "param")} if isinstance(error, dict) else codes
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return codes, " ".join(str(text).split())[:300] or answer.reason_phrase


def _remedy(codes: set[str], text: str, body: bytes) -> str | None:
    """How to mend a refusal that names a setting of the request; None where it names none, or is about this prompt."""
    words = text.lower()
    if any(mark in words or mark in codes for mark in _TOO_LONG):
        return None
    for name in json.loads(body).keys() - {"model", "messages", "tools"}:
        if name in codes or re.search(rf"[\"'`]{re.escape(name)}[\"'`]", words) or (name in _OURS and name in words):
            if name in _LIMITS and ("support" in words or _LIMITS[name] in words):
                return f"give this teacher {_LIMITS[name]} in place of {name}"
            return 'give this teacher temperature = "unsent"' if name == "temperature" else f"change its {name}"
    return "leave prompt_cache out of this teacher" if "cache_control" in words else None


def named(error: Exception) -> str:
    """An error's kind and words."""
    return f"{type(error).__name__}: {error}".rstrip(": ")
