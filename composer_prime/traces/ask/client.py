"""One request to a server with OpenAI's chat completions, and what became of it: an answer, a refusal, or nobody knows.

The difference is money: what was refused costs nothing, what was lost may have been paid for.
"""

import asyncio
import email.utils
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from composer_prime.bearer import is_local
from composer_prime.errors import BadInput

PATH = "/v1/chat/completions"

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol)
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_BEHIND_A_GATEWAY = frozenset({408, 502, 504})
"""With these a gateway gave up; the model behind it may have answered, and been paid."""


@dataclass(frozen=True)
class Reply:
    """What became of one request.

    answer         the JSON of a 200, whatever it is; None with a 200 whose text isn't JSON
    why            there is no 200; None: there is
    is_lost        the server may have answered and charged for it
    is_passing     another try may do
    is_about_this  the server takes others, but not this question
    retry_after_s  the server wants so long a pause
    """

    answer: Any = None
    why: str | None = None
    is_lost: bool = False
    is_passing: bool = False
    is_about_this: bool = False
    retry_after_s: float | None = None


class ChatClient:
    """Sends requests to one server. `close` it in the end.

    key_var  the environment variable with the server's key; raises BadInput when it is named and not set.
    """

    def __init__(
        self, base_url: str, timeout_s: float, key_var: str | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        if key_var is not None and not environment.get(key_var):
            raise BadInput(f"api_key_var ({key_var}) isn't set: export the key of {base_url} in it")
        self.base_url = base_url
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {environment[key_var]}"} if key_var is not None else {},
            timeout=None,
            limits=httpx.Limits(max_connections=None),
            trust_env=not is_local(base_url),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def complete(self, body: bytes) -> Reply:
        """Send one chat completion's request, once."""
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._http.post(PATH, content=body, headers=headers)
        except _NEVER_SENT as error:
            return Reply(why=f"{self.base_url} can't be reached: {_named(error)}", is_passing=True)
        except TimeoutError:
            return Reply(why=f"no answer within {self._timeout_s:g} s", is_lost=True, is_passing=True)
        except (httpx.TransportError, httpx.DecodingError) as error:
            return Reply(why=f"the answer was lost: {_named(error)}", is_lost=True, is_passing=True)
        return _read(answer)

    async def first_model(self) -> str:
        """The first model that the server lists. Raises BadInput when there is none."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._http.get("/v1/models")
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
            raise BadInput(f"{self.base_url} lists no model at /v1/models ({_named(error)}): give its URL") from None


def _read(answer: httpx.Response) -> Reply:
    status = answer.status_code
    if answer.is_success:
        try:
            return Reply(answer.json())
        except (ValueError, RecursionError):
            return Reply(None)
    return Reply(
        why=f"{status}: {_message(answer)}",
        is_lost=status in _BEHIND_A_GATEWAY,
        is_passing=status in _PASSING,
        is_about_this=status in (400, 413, 422),
        retry_after_s=_retry_after(answer.headers.get("retry-after")),
    )


def _message(answer: httpx.Response) -> str:
    """The error's own words, on one line."""
    try:
        error = json.loads(answer.text)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        text = answer.text
    return " ".join(str(text).split())[:300] or answer.reason_phrase


def _retry_after(value: str | None) -> float | None:
    """Seconds of the header, given as such or as a date; None where it says neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
