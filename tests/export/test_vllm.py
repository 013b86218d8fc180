"""vLLM loads what we export, and takes each new snapshot of a run that it follows."""

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from transformers import AutoModelForCausalLM

from composer_prime.export.following import Follower
from composer_prime.export.reading import MasterReader
from composer_prime.export.server import WeightServer
from composer_prime.sites.embedded.inference.vllm_server import VllmServer
from tests.export.runs import make_run
from tests.export.test_following import Growing
from tests.patience import PATIENCE_S
from tests.sites.tiny_folder import save_random_tiny, score

pytestmark = pytest.mark.vllm

PROMPT = [10, 20, 30, 40]


def assert_answers_as(url: str, folder: Path) -> None:
    """The server's log-probabilities are those of the model in the folder."""
    asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "seed": 0, "logprobs": 1, "ignore_eos": True}
    body = {"model": VllmServer.model_name, "token_ids": PROMPT, "sampling_params": asked}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=PATIENCE_S)
    (choice,) = answer.raise_for_status().json()["choices"]
    told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    assert told == pytest.approx(score(policy, PROMPT, choice["token_ids"]), abs=1e-3)


def test_a_vllm_serves_an_exported_folder_and_follows_the_run(tmp_path):
    python = os.environ.get("COMPOSER_PRIME_VLLM_PYTHON")
    if not python:
        pytest.skip("COMPOSER_PRIME_VLLM_PYTHON names no environment with vLLM")
    # Untied: vLLM on a CPU keeps a tied head's packing through a reload, see sites/embedded/inference/vllm_folder.py.
    base = save_random_tiny(tmp_path / "base", tie_word_embeddings=False)
    growing = Growing(make_run(f"memory://{tmp_path.name}-whole", base, rounds=2), tmp_path.name)
    growing.show(1)
    followed = tmp_path / "followed"

    def follower(server: WeightServer | None) -> Follower:
        return Follower(MasterReader(growing.store), base, "float32", followed, server, say=print)

    assert follower(None).look()
    server = VllmServer(
        followed / "newest", python=Path(python), log=tmp_path / "vllm.log", seed=0, max_batch_size=2, max_model_len=64
    )
    try:
        asyncio.run(ready(server))
        assert_answers_as(server.base_url, followed / "version_00000001")
        growing.show(2)
        told = WeightServer(server.base_url, "vllm")
        assert follower(told).look()
        assert_answers_as(server.base_url, followed / "version_00000002")
        told.close()
    finally:
        server.close()


async def ready(server: VllmServer) -> None:
    async with aiohttp.ClientSession(server.base_url) as http:
        await server.wait_ready(http)
