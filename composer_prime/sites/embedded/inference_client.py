"""What the orchestrator itself asks of its site's inference server: whether it is up, its model, newer weights.

Rollouts reach the server through verifiers' own client; this one is for the few calls around them. The trainer puts
weights into broadcasts/step_N and a STABLE marker last; the policy version is N, the number of training steps behind
them. Weights that were overtaken before they were taken are skipped.
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import httpx

from composer_prime.bearer import headers, site_token
from composer_prime.config.paths import SitePaths
from composer_prime.errors import SiteError

READY_TIMEOUT_S = 300.0
"""A server that isn't healthy after this long (a vLLM server takes about a minute) ends the site."""

UPDATE_PATIENCE_S = 300.0
"""An inference server that refuses new weights for this long (a restart takes seconds) ends the site."""

_POLL_S = 0.1
_WEIGHTS_POLL_S = 0.05
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

    async def __aexit__(self, *_: object) -> None:
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


def newest_broadcast(paths: SitePaths, since: float = 0.0) -> tuple[int, Path] | None:
    """The newest complete weights the trainer published, and their policy version; None before the first.

    since  file time (seconds) before which a broadcast is left over from an earlier start of the site.
    """
    found = []
    for stable in paths.broadcasts.glob("step_*/STABLE"):
        with contextlib.suppress(FileNotFoundError):  # the trainer drops old broadcasts meanwhile
            if stable.stat().st_mtime >= since:
                found.append((int(stable.parent.name.removeprefix("step_")), stable.parent))
    return max(found, default=None)


class WeightsWatcher:
    """Keeps the inference server at the newest weights while `follow` runs.

    version  what the server holds, and starts with: 0 for the weights in the model folder, -1 when those don't count
             because the trainer will publish others before its first step. It never goes down.
    """

    def __init__(self, paths: SitePaths, inference: InferenceClient, version: int) -> None:
        self.version = version
        self._paths = paths
        self._since = paths.settings.stat().st_mtime  # written right before the site's processes are started
        self._inference = inference
        self._moved = asyncio.Condition()
        self._refused_since: float | None = None

    async def follow(self) -> None:
        """Pass on every newer broadcast, for ever. Raises SiteError when the server keeps refusing them."""
        while True:
            await self._pass_on_newest()
            await asyncio.sleep(_WEIGHTS_POLL_S)

    async def at_least(self, version: int) -> int:
        """Wait until the server holds this version or a newer one, and return which."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.version >= version)
        return self.version

    async def _pass_on_newest(self) -> None:
        newest = newest_broadcast(self._paths, self._since)
        if newest is None or newest[0] <= self.version:
            return
        version, folder = newest
        try:
            await self._inference.update_weights(folder, version)
        except httpx.HTTPError as error:
            self._bear(version, error)
            return
        self._refused_since = None
        async with self._moved:
            self.version = version
            self._moved.notify_all()

    def _bear(self, version: int, error: httpx.HTTPError) -> None:
        """Let a failed update pass: the next look tries again, or finds newer weights. Not for ever, though."""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
            logger.warning("policy_version=%d not taken yet: %r", version, error)
        if now - self._refused_since > UPDATE_PATIENCE_S:
            raise SiteError(
                f"the inference server at {self._inference.base_url} has refused new weights for "
                f"{UPDATE_PATIENCE_S:g} s, last with {error!r}: see its log"
            ) from error
