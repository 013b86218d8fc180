"""Carries the trainer's new weights to the inference server, and knows which version it holds.

The trainer puts weights into broadcasts/step_N and a STABLE marker last; the policy version is N, the number of
training steps behind them. Weights that were overtaken before they were taken are skipped.
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import httpx

from composer_prime.config.paths import SitePaths
from composer_prime.errors import SiteError
from composer_prime.sites.embedded.inference_client import InferenceClient

UPDATE_PATIENCE_S = 300.0
"""An inference server that refuses new weights for this long (a restart takes seconds) ends the site."""

_POLL_S = 0.05

logger = logging.getLogger(__name__)


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
        self._turn = asyncio.Lock()
        self._moved = asyncio.Condition()
        self._refused_since: float | None = None

    async def follow(self) -> None:
        """Pass on every newer broadcast, for ever. Raises SiteError when the server keeps refusing them."""
        while True:
            await self._pass_on_newest(above=self.version)
            await asyncio.sleep(_POLL_S)

    async def at_least(self, version: int) -> int:
        """Wait until the server holds this version or a newer one, and return which."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.version >= version)
        return self.version

    async def renew(self) -> None:
        """Tell the server the newest weights again if it has older ones: it was restarted with its first."""
        with contextlib.suppress(httpx.HTTPError):  # whoever finds it gone asks again
            if await self._inference.policy_version() < self.version:
                await self._pass_on_newest(above=-1)

    async def _pass_on_newest(self, above: int) -> None:
        async with self._turn:  # one at a time, or an older update could land last
            newest = newest_broadcast(self._paths, self._since)
            if newest is None or newest[0] <= above:
                return
            version, folder = newest
            try:
                await self._inference.update_weights(folder, version)
            except httpx.HTTPError as error:
                self._bear(version, error)
                return
        self._refused_since = None
        async with self._moved:
            self.version = max(self.version, version)
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
