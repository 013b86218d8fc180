"""A real vLLM server as a teacher; run where COMPOSER_PRIME_VLLM_PYTHON names a python that has vLLM (`-m vllm`)."""

import asyncio
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from transformers import AutoTokenizer

from composer_prime.config.teachers import TeacherConfig
from composer_prime.errors import TeacherRefused
from composer_prime.sites.embedded.inference.vllm_folder import make_whole_folder, tied_names
from composer_prime.sites.embedded.inference.vllm_server import VllmServer
from composer_prime.sites.embedded.model import load_policy
from composer_prime.teachers.pool import Score, TeacherPool
from tests.sites.tiny_folder import save_random_tiny, score

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_tiny(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def teacher(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeacherConfig]:
    """The tables of a vLLM server that serves the folder, once it answers."""
    python = os.environ.get("COMPOSER_PRIME_VLLM_PYTHON")
    if not python:
        pytest.skip("COMPOSER_PRIME_VLLM_PYTHON names no environment with vLLM")
    whole = tmp_path_factory.mktemp("whole")
    make_whole_folder(whole, model_dir=folder, weight_dir=folder, tied=tied_names(load_policy(folder)))
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    server = VllmServer(whole, python=Path(python), log=log, seed=0, max_batch_size=8, max_model_len=256)

    async def wait() -> None:
        async with aiohttp.ClientSession(server.base_url) as http:
            await server.wait_ready(http)

    try:
        asyncio.run(wait())
        yield TeacherConfig(name="vllm", base_url=server.base_url, timeout_s=120)
    finally:
        server.close()


async def check_and_score(config: TeacherConfig, tokenizer: object, prompts: list[list[int]]) -> list[Score]:
    pool = TeacherPool([config])
    try:
        await pool.check(tokenizer)
        return [answer for answers in await asyncio.gather(*map(pool.score, prompts)) for answer in answers]
    finally:
        await pool.close()


@pytest.mark.parametrize("route", [None, "/inference/v1/generate"])
def test_vllm_passes_the_check_and_scores_as_a_plain_forward_does(
    teacher: TeacherConfig, folder: Path, route: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if route is not None:
        monkeypatch.setattr("composer_prime.teachers.served.ROUTES", (route,))
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (2, 17, 100)]
    answers = asyncio.run(check_and_score(teacher, AutoTokenizer.from_pretrained(folder), prompts))
    model = load_policy(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.failure is None and answer.scores is not None
        assert math.isnan(answer.scores.logprobs[0])
        assert answer.scores.logprobs[1:] == pytest.approx(score(model, prompt[:1], prompt[1:]), abs=1e-4)


def test_vllm_with_another_tokenizer_than_the_policys_is_refused(teacher: TeacherConfig, folder: Path) -> None:
    other = AutoTokenizer.from_pretrained(folder)
    other.add_tokens(["<|another|>"], special_tokens=True)
    with pytest.raises(
        TeacherRefused, match=r"teacher vllm (has another tokenizer|can't be used: .* refused /detokenize)"
    ):
        asyncio.run(check_and_score(teacher, other, [[1, 2]]))
