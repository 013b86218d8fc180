"""Tells an inference server to take new weights: PRIME-RL's vLLM server, our embedded one, or a plain vLLM.

PRIME-RL and ours: POST /pause, /update_weights {"weight_dir": folder, "version": N}, /resume; PRIME-RL's reads only the
folder. A plain vLLM started with VLLM_SERVER_DEV_MODE=1: /collective_rpc reload_weights in the place of the second.

Source: PRIME-RL's inference/vllm/server.py at 559b447; vLLM 0.32's serve/dev and rl/online routers.
"""

import logging
import os
from pathlib import Path
from typing import Any, Literal

import httpx

from composer_prime.bearer import SITE_TOKEN, headers, is_local
from composer_prime.errors import BadInput, SiteError

Api = Literal["prime-rl", "vllm"]

HEALTH_TIMEOUT_S = 5.0
PAUSE_TIMEOUT_S = 300.0
"""A pause may wait until what runs has been answered."""
UPDATE_TIMEOUT_S = 720.0
"""PRIME-RL's own patience for an update."""

logger = logging.getLogger(__name__)


class ServerDown(SiteError):
    """The server didn't answer, or said that it can't now: it may come back."""


class WeightServer:
    """One server, by the URL of its root (without /v1). `close` it in the end."""

    def __init__(self, url: str, api: Api = "prime-rl") -> None:
        """Raises BadInput for what is no HTTP URL."""
        if not url.startswith(("http://", "https://")) or not httpx.URL(url).host:
            raise BadInput(f"--server ({url}) must be an http:// or https:// URL such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api = api
        token = os.environ.get(SITE_TOKEN) if is_local(self.url) else None  # of a site's own server
        sent = {} if token is None else headers(token)
        self._http = httpx.Client(base_url=self.url, headers=sent, trust_env=False, timeout=HEALTH_TIMEOUT_S)
        self._warned = False

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def is_ready(self) -> bool:
        """Whether it answers /health with success."""
        try:
            return self._http.get("/health").is_success
        except httpx.TransportError:
            return False

    def held_version(self) -> int | None:
        """The version of the weights that it says it holds; None where it doesn't say, or doesn't answer."""
        try:
            told = self._http.get("/health").json()
        except (httpx.TransportError, ValueError):
            return None
        version = told.get("policy_version") if isinstance(told, dict) else None
        return version if isinstance(version, int) else None

    def update(self, folder: Path, version: int) -> None:
        """Have later requests answered by the weights in `folder`, which it must see under the same path.

        What runs goes on under the pause that the server knows: ours lets it finish, PRIME-RL's holds it. The server
        is resumed in any case. Raises ServerDown when it may take them later, SiteError when it refuses them.
        """
        self._post("/pause", PAUSE_TIMEOUT_S, params={"mode": "wait"}, optional=True)
        try:
            if self._api == "prime-rl":
                self._post("/update_weights", UPDATE_TIMEOUT_S, json={"weight_dir": str(folder), "version": version})
            else:
                call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._post("/collective_rpc", UPDATE_TIMEOUT_S, json=call)
            self._forget_prompts()
        finally:
            self._post("/resume", PAUSE_TIMEOUT_S, optional=True)

    def _forget_prompts(self) -> None:
        """vLLM keeps what it worked out for prompts under the old weights; an orchestrator's salts keep it apart."""
        if not self._post("/reset_prefix_cache", PAUSE_TIMEOUT_S, optional=True) and not self._warned:
            self._warned = True
            logger.info("server=%s has no /reset_prefix_cache: a vLLM needs VLLM_SERVER_DEV_MODE=1 for it", self.url)

    def _post(self, path: str, timeout_s: float, *, optional: bool = False, **body: Any) -> bool:
        """Whether the server has this route; only an optional one may be missing."""
        timeout = httpx.Timeout(timeout_s, connect=HEALTH_TIMEOUT_S)
        try:
            answer = self._http.post(path, timeout=timeout, **body)
        except httpx.TransportError as error:
            raise ServerDown(f"the server at {self.url} didn't answer {path} ({type(error).__name__})") from error
        if answer.status_code == 404 and optional:
            return False
        if answer.status_code >= 500:
            raise ServerDown(f"the server at {self.url} answered {path} with {answer.status_code}: {_said(answer)}")
        if answer.is_error:
            raise SiteError(
                f"the server at {self.url} refused {path} with {answer.status_code}: {_said(answer)}; serve the model "
                "of this run, and name the server's kind with --api"
            )
        return True


def _said(answer: httpx.Response) -> str:
    return " ".join(answer.text.split())[:300] or "nothing"
