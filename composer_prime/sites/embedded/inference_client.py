"""What the orchestrator itself asks of its site's inference server: whether it is up, its model, newer weights.

Rollouts reach the server through verifiers' own client; this one is for the few calls around them.
"""

import asyncio
import logging
import time
from pathlib import Path
from types import TracebackType

import httpx

from composer_prime.bearer import headers, site_token
from composer_prime.errors import SiteError

READY_TIMEOUT_S = 300.0
"""A server that isn't healthy after this long (a vLLM server takes about a minute) ends the site."""

_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 5.0
_UPDATE_TIMEOUT_S = 120.0

logger = logging.getLogger(__name__)


class InferenceClient:
    """The inference server at `base_url` (its root, without /v1), while it is entered (`async with`)."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=headers(site_token()), trust_env=False, timeout=_UPDATE_TIMEOUT_S
        )

    async def __aenter__(self) -> "InferenceClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once /health answers 200. Raises SiteError after `timeout_s` seconds without it."""
        deadline = time.monotonic() + timeout_s
        while not await self._is_healthy():
            if time.monotonic() >= deadline:
                raise SiteError(
                    f"the inference server at {self.base_url} wasn't healthy within {timeout_s:g} s: see its log"
                )
            await asyncio.sleep(_POLL_S)

    async def trouble(self) -> str | None:
        """Why it answers no rollouts; None: it does."""
        try:
            status = (await self._http.get("/health", timeout=_HEALTH_TIMEOUT_S)).json()["status"]
        except (httpx.TransportError, ValueError, KeyError) as error:
            return f"the inference server, which doesn't answer ({type(error).__name__}): see its log"
        return None if status == "ready" else f"the inference engine, which is {status}: see its log"

    async def policy_version(self) -> int:
        """The version of the weights it holds. Raises httpx.HTTPError when it doesn't say."""
        answer = await self._http.get("/health", timeout=_HEALTH_TIMEOUT_S)
        answer.raise_for_status()
        return answer.json()["policy_version"]

    async def model_name(self) -> str:
        """The name under which the policy is served."""
        answer = await self._http.get("/v1/models")
        answer.raise_for_status()
        return answer.json()["data"][0]["id"]

    async def update_weights(self, folder: Path, version: int) -> None:
        """Have later requests answered by the weights in `folder`. Raises httpx.HTTPError when that didn't happen."""
        answer = await self._http.post("/update_weights", json={"weight_dir": str(folder), "version": version})
        answer.raise_for_status()
        logger.info("policy_version=%d weights=%s", version, folder)

    async def _is_healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=_HEALTH_TIMEOUT_S)).is_success
        except httpx.TransportError:
            return False
