"""The engine that puts a real vLLM server behind our routes: its answers in our shapes, its weights by version.

What PRIME-RL's inference does inside vLLM is done here from outside: requests are held back while weights change, and
vLLM's own cache of prompts is emptied with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from composer_prime.config.model_folder import loading
from composer_prime.errors import BadInput, SiteError
from composer_prime.sites.embedded.inference.engine import Completion, FinishReason, Gate, GenerateRequest
from composer_prime.sites.embedded.inference.reload import read_weights
from composer_prime.sites.embedded.inference.vllm_folder import make_whole_folder, tied_names
from composer_prime.sites.embedded.inference.vllm_server import VllmServer

_TIMEOUT = aiohttp.ClientTimeout(total=None)  # a long completion may take any time; a dead server is noticed
_WATCH_S = 0.5
_NO_EVIDENCE = -9999.0  # what vLLM says where it has no log-probability


class VllmEngine:
    """See `Engine`. The arguments are those of `VllmServer`, and `on_failure` of `TransformersEngine`."""

    def __init__(
        self,
        folder: Path,
        *,
        python: Path | None,
        log: Path,
        seed: int,
        max_batch_size: int,
        max_model_len: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.max_model_len = max_model_len
        self.policy_version = 0
        self._folder = folder
        self._python = python
        self._log = log
        self._seed = seed
        self._max_batch_size = max_batch_size
        self._on_failure = on_failure
        self._gate = Gate()
        self._closing = contextlib.AsyncExitStack()

    async def start(self) -> None:
        self._skeleton = _skeleton(self._folder)
        self._tied = tied_names(self._skeleton)
        positions = getattr(self._skeleton.config.get_text_config(), "max_position_embeddings", None)
        self.max_model_len = min(self.max_model_len, positions or self.max_model_len)
        whole = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="composer-prime-model-")))
        self._make_whole(whole, self._folder)
        self._server = VllmServer(
            whole,
            python=self._python,
            log=self._log,
            seed=self._seed,
            max_batch_size=self._max_batch_size,
            max_model_len=self.max_model_len,
        )
        self._closing.callback(self._server.close)
        # Not httpx, whose client takes 3 ms of a core per request when 64 are open: 67 a second, against 900.
        connector = aiohttp.UnixConnector(self._server.socket, limit=0)
        self._http = await self._closing.enter_async_context(
            aiohttp.ClientSession(self._server.base_url, connector=connector, timeout=_TIMEOUT)
        )
        await self._server.wait_ready(self._http)
        watching = asyncio.create_task(self._watch())
        self._closing.callback(watching.cancel)

    async def generate(self, request: GenerateRequest) -> Completion:
        room = self.max_model_len - len(request.token_ids)
        if room < 1:
            raise BadInput(
                f"prompt ({len(request.token_ids)} tokens) must be shorter than the context ({self.max_model_len} "
                "tokens): shorten it"
            )
        async with self._gate.passing():
            version = self.policy_version
            answer = await self._post("/inference/v1/generate", _body(request, room, self._server.model_name))
        return _completion(request, answer, version)

    async def load_weights(self, folder: Path, version: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, read_weights, folder, self._skeleton)  # a bad folder would end vLLM's worker
        async with self._gate.idle():
            with tempfile.TemporaryDirectory(prefix="composer-prime-weights-") as whole:
                self._make_whole(Path(whole), folder)
                await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": whole}})
            await self._post("/reset_prefix_cache", None)
            self.policy_version = version

    async def pause(self) -> None:
        await self._gate.pause()

    async def resume(self) -> None:
        await self._gate.resume()

    async def close(self) -> None:
        await self._closing.aclose()

    def _make_whole(self, target: Path, weight_dir: Path) -> None:
        make_whole_folder(target, model_dir=self._folder, weight_dir=weight_dir, tied=self._tied)

    async def _watch(self) -> None:
        """Say so when the server ends by itself."""
        while True:
            try:
                self._server.check_alive()
            except SiteError as error:
                self._on_failure(error)
                return
            await asyncio.sleep(_WATCH_S)

    async def _post(self, path: str, body: dict[str, Any] | None) -> Any:
        try:
            async with self._http.post(path, json=body) as answer:
                status, text = answer.status, await answer.text()
        except aiohttp.ClientError as error:
            self._server.check_alive()
            raise SiteError(f"vLLM didn't answer {path}: {error!r}") from error
        if status == 400:
            raise BadInput(json.loads(text)["error"]["message"])
        if status >= 400:
            raise SiteError(f"vLLM answered {path} with {status}: {text[:500]}")
        return json.loads(text) if text else None


def _skeleton(folder: Path) -> PreTrainedModel:
    """The model without weights, to check new ones against."""
    with loading(f"model folder {folder}", "give a causal LM's"), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _body(request: GenerateRequest, room: int, model_name: str) -> dict[str, Any]:
    sampling = request.sampling
    asked: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": min(room, sampling.max_tokens or room),
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "logprobs": max(1, request.top_logprobs),
        "skip_special_tokens": False,
    }
    if request.prompt_logprobs is not None:
        asked["prompt_logprobs"] = request.prompt_logprobs
    if sampling.seed is not None:
        asked["seed"] = sampling.seed
    body: dict[str, Any] = {"model": model_name, "token_ids": list(request.token_ids), "sampling_params": asked}
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    return body


def _completion(request: GenerateRequest, answer: Any, version: int) -> Completion:
    """vLLM's answer as ours. Raises SiteError when it lacks what training needs."""
    try:
        choice = answer["choices"][0]
        token_ids = [int(token) for token in choice["token_ids"]]
        logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        finish_reason: FinishReason = choice["finish_reason"]
        scores = None if request.prompt_logprobs is None else _prompt_logprobs(answer)
        top = [_top_logprobs(entry, request.top_logprobs) for entry in choice["logprobs"]["content"]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise SiteError(f"vLLM's answer has another shape than that of 0.32: {error!r}") from error
    if finish_reason not in ("stop", "length"):
        raise SiteError(f"vLLM ended the sequence with {finish_reason!r}")
    if len(logprobs) != len(token_ids) or not all(math.isfinite(one) and one > _NO_EVIDENCE for one in logprobs):
        raise SiteError(f"vLLM gave no log-probability for some of {len(token_ids)} tokens")
    likeliest = top if request.top_logprobs else None
    return Completion(request.request_id, token_ids, logprobs, finish_reason, version, scores, likeliest)


def _top_logprobs(entry: Any, k: int) -> dict[int, float]:
    """The k likeliest in a sampled token's place."""
    listed = entry["top_logprobs"][:k] if k else []
    return {int(one["token"].removeprefix("token_id:")): float(one["logprob"]) for one in listed}


def _prompt_logprobs(answer: Any) -> list[dict[int, float]]:
    """Those of all prompt tokens but the first, for which vLLM has none; empty where it has no entry."""
    return [
        {int(token): float(found["logprob"]) for token, found in (entry or {}).items()}
        for entry in answer["prompt_logprobs"][1:]
    ]
