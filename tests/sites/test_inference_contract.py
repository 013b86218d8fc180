"""The contract of every engine behind the routes: the transformers one, and a real vLLM server where there is one.

vLLM runs where COMPOSER_PRIME_VLLM_PYTHON names the python of an environment that has it (`pytest -m vllm`).
"""

import asyncio
import functools
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from composer_prime.sites.embedded.inference.app import VERSION_HEADER, Server
from composer_prime.sites.embedded.inference.engine import Engine
from composer_prime.sites.embedded.inference.serve import load_tokenizer, make_engine
from composer_prime.sites.embedded.model import load_policy
from tests.patience import PATIENCE_S
from tests.sites.letters_site import letters_site
from tests.sites.tiny_folder import END_OF_TURN, PAST_VOCABULARY, save_random_tiny, score

CONTEXT = 256
FAILURES: list[BaseException] = []


@dataclass
class Site:
    """A running server, spoken to without a socket, and what is needed to check it."""

    http: httpx.AsyncClient
    engine: Engine
    policies: dict[int, PreTrainedModel]
    """By the version it is loaded as."""
    folders: dict[int, Path]

    async def generate(self, prompt: list[int], status: int = 200, **sampling: Any) -> Any:
        body = {"model": "tiny", "token_ids": prompt, "sampling_params": {"logprobs": 1, **sampling}}
        answer = await self.http.post("/inference/v1/generate", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def update(self, version: int) -> httpx.Response:
        body = {"weight_dir": str(self.folders[version]), "version": version}
        answer = await self.http.post("/update_weights", json=body)
        assert (answer.status_code, answer.json()["policy_version"]) == (200, version), answer.text
        return answer

    async def until_running(self, num_requests: int) -> None:
        """Return once so many requests are past the gate."""
        while self.engine._gate._num_running < num_requests:  # pyright: ignore[reportAttributeAccessIssue]
            await asyncio.sleep(0)

    def assert_scored(self, prompt: list[int], answer: Any, temperature: float = 1.0) -> None:
        """The answer's log-probabilities are those of the version it names, from a plain forward."""
        (choice,) = answer["choices"]
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        expected = score(self.policies[answer["policy_version"]], prompt, choice["token_ids"], temperature)
        assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=1e-4)


ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", params=ENGINES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`site(test)` runs a coroutine function on a site whose policy version is 0."""
    python = os.environ.get("COMPOSER_PRIME_VLLM_PYTHON")
    if request.param == "vllm" and not python:
        pytest.skip("COMPOSER_PRIME_VLLM_PYTHON names no environment with vLLM")
    root = tmp_path_factory.mktemp(request.param)
    folders = {0: save_random_tiny(root / "model"), 1: root / "step_1", 2: root / "step_2"}
    for version in (1, 2):
        whole = save_random_tiny(root / f"whole_{version}", seed=version)
        folders[version].mkdir()
        (whole / "model.safetensors").rename(folders[version] / "model.safetensors")  # as a trainer: weights alone
    settings = letters_site(
        root / "out",
        model_dir=folders[0],
        seq_len=CONTEXT,
        inference={"engine": request.param, "max_batch_size": 16} | ({"python": python} if python else {}),
    )
    with asyncio.Runner() as runner:
        running = _running(make_engine(settings, FAILURES.append), folders)
        opened = runner.run(running.__aenter__())

        def run(test: Callable[[Site], Any]) -> None:
            runner.run(_on_version_0(test, opened))

        try:
            yield run
        finally:
            runner.run(running.__aexit__(None, None, None))
    assert not FAILURES


@asynccontextmanager
async def _running(engine: Engine, folders: dict[int, Path]) -> AsyncIterator[Site]:
    policies = {0: load_policy(folders[0])}
    for version in (1, 2):
        policies[version] = load_policy(folders[0])
        policies[version].load_state_dict(load_file(folders[version] / "model.safetensors"), strict=False)
    server = Server(engine, "tiny", load_tokenizer(folders[0]))
    transport = httpx.ASGITransport(server.app(None))  # pyright: ignore[reportArgumentType]
    async with httpx.AsyncClient(transport=transport, base_url="http://site", timeout=PATIENCE_S) as http:
        assert (await http.get("/health")).status_code == 503
        refused = await http.post("/inference/v1/generate", json={"token_ids": [1]})
        assert refused.status_code == 503 and "starting" in refused.json()["error"]["message"]
        try:
            await engine.start()
            server.is_ready = True
            yield Site(http, engine, policies, folders)
        finally:
            await engine.close()


async def _on_version_0(test: Callable[[Site], Any], site: Site) -> None:
    await site.update(0)
    await test(site)


def on_site(test: Callable[..., Any]) -> Callable[..., None]:
    """Makes a test of a coroutine function, which gets the site itself in the place of the fixture."""

    @functools.wraps(test)
    def run(site: Callable[..., None], **more: Any) -> None:
        site(lambda opened: test(opened, **more))

    return run


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * length + seed)
    return [rng.randrange(256) for _ in range(length)]


@on_site
async def test_health_and_models_say_what_is_served(site: Site) -> None:
    health = await site.http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ready", "policy_version": 0})
    (card,) = (await site.http.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", CONTEXT)


@on_site
async def test_health_says_that_the_engine_is_paused(site: Site) -> None:
    for path, status in (("/pause", "paused"), ("/resume", "ready")):
        await site.http.post(path)
        assert (await site.http.get("/health")).json()["status"] == status


@on_site
async def test_batched_logprobs_are_those_of_an_unbatched_forward(site: Site) -> None:
    prompts = [prompt_of(length) for length in (1, 2, 5, 38, 100, 38, 7, 64, 3, 90)]
    answers = await asyncio.gather(*(site.generate(prompt, max_tokens=12) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["policy_version"] == 0 and answer["choices"][0]["finish_reason"] in ("length", "stop")
        site.assert_scored(prompt, answer)


@pytest.mark.parametrize("temperature", [0.4, 1.7])
@on_site
async def test_logprobs_are_taken_after_temperature(site: Site, temperature: float) -> None:
    prompt = prompt_of(20)
    site.assert_scored(prompt, await site.generate(prompt, temperature=temperature, max_tokens=10), temperature)


@on_site
async def test_temperature_zero_is_greedy(site: Site) -> None:
    prompt = prompt_of(30)
    tokens = (await site.generate(prompt, temperature=0, max_tokens=6))["choices"][0]["token_ids"]
    for i, token in enumerate(tokens):
        logits = site.policies[0](input_ids=torch.tensor([prompt + tokens[:i]])).logits[0, -1]
        assert int(logits.argmax()) == token


@on_site
async def test_a_seed_repeats_and_others_differ(site: Site) -> None:
    seeds = (1, 1, 2, 3)
    answers = await asyncio.gather(*(site.generate(prompt_of(9), max_tokens=12, seed=seed) for seed in seeds))
    tokens = [tuple(answer["choices"][0]["token_ids"]) for answer in answers]
    assert tokens[0] == tokens[1] and len(set(tokens)) == 3


@on_site
async def test_the_stop_token_ends_the_answer_and_is_part_of_it(site: Site) -> None:
    prompt = prompt_of(15)
    tokens = (await site.generate(prompt, temperature=0, max_tokens=8))["choices"][0]["token_ids"]
    answer = await site.generate(prompt, temperature=0, max_tokens=8, stop_token_ids=[tokens[3], END_OF_TURN])
    (choice,) = answer["choices"]
    assert choice["token_ids"] == tokens[: tokens.index(tokens[3]) + 1] and choice["finish_reason"] == "stop"
    site.assert_scored(prompt, answer)


@on_site
async def test_the_context_bounds_prompt_and_completion(site: Site) -> None:
    answer = await site.generate(prompt_of(CONTEXT - 3), max_tokens=50)
    assert len(answer["choices"][0]["token_ids"]) <= 3
    refused = await site.generate(prompt_of(CONTEXT), status=400, max_tokens=1)
    assert f"prompt ({CONTEXT} tokens) must be shorter" in refused["error"]["message"]


@on_site
async def test_bad_requests_are_answered_with_the_reason(site: Site) -> None:
    out_of_vocabulary = await site.generate([PAST_VOCABULARY], status=400, max_tokens=1)
    assert "vocabulary" in out_of_vocabulary["error"]["message"]
    unknown = await site.generate([1], status=400, beam_width=2)
    assert "beam_width" in unknown["error"]["message"]
    body = {"model": "other", "token_ids": [1]}
    answer = await site.http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 400 and "model (other) isn't served here" in answer.json()["error"]["message"]
    answer = await site.http.post("/inference/v1/generate", content=b"{no json")
    assert answer.status_code == 400 and "body isn't JSON" in answer.json()["error"]["message"]


@on_site
async def test_an_update_swaps_the_policy_between_requests(site: Site) -> None:
    prompt = prompt_of(38)
    seen = []
    for version in (0, 1, 2, 1):
        await site.update(version)
        answer = await site.generate(prompt, temperature=0, max_tokens=10)
        assert answer["policy_version"] == version == site.engine.policy_version
        site.assert_scored(prompt, answer)
        seen.append(answer["choices"][0]["token_ids"])
    assert seen[0] != seen[1] != seen[2] and seen[1] == seen[3]


@on_site
async def test_a_request_in_flight_during_an_update_is_one_policys_alone(site: Site) -> None:
    prompts = [prompt_of(24, seed) for seed in range(24)]
    early = [asyncio.create_task(site.generate(prompt, max_tokens=100)) for prompt in prompts[:8]]
    await site.until_running(8)
    update = asyncio.create_task(site.update(1))
    during = [asyncio.create_task(site.generate(prompt, max_tokens=20)) for prompt in prompts[8:16]]
    await asyncio.wait(early, return_when=asyncio.FIRST_COMPLETED)
    await update
    late = await asyncio.gather(*(site.generate(prompt, max_tokens=20) for prompt in prompts[16:]))
    answers = [*await asyncio.gather(*early), *await asyncio.gather(*during), *late]
    assert {answer["policy_version"] for answer in answers[:8]} == {0}
    assert {answer["policy_version"] for answer in late} == {1}
    for prompt, answer in zip(prompts, answers, strict=True):
        site.assert_scored(prompt, answer)


@on_site
async def test_pause_holds_new_requests_and_lets_running_ones_finish(site: Site) -> None:
    running = asyncio.create_task(site.generate(prompt_of(12), max_tokens=60))
    await site.until_running(1)
    assert (await site.http.post("/pause")).status_code == 200
    assert running.done(), "a pause waits for what runs"
    held = asyncio.create_task(site.generate(prompt_of(13), max_tokens=2))
    done, _ = await asyncio.wait([held], timeout=0.2)
    assert not done
    await site.update(1)
    assert not held.done(), "an update does not end a pause"
    assert (await site.http.post("/resume")).status_code == 200
    assert (await held)["policy_version"] == 1


@on_site
async def test_weights_that_do_not_fit_are_refused_and_the_policy_stays(site: Site, tmp_path: Path) -> None:
    weights = load_file(save_random_tiny(tmp_path / "source") / "model.safetensors")
    first = sorted(weights)[0]
    bad = {
        "lacks": {name: value for name, value in weights.items() if name != first},
        "has what the model doesn't have: extra": weights | {"extra": torch.zeros(1)},
        "another shape": weights | {first: torch.zeros(3, 3)},
        "aren't finite": weights | {first: torch.full_like(weights[first], float("nan"))},
    }

    async def refusal(folder: Path) -> str:
        answer = await site.http.post("/update_weights", json={"weight_dir": str(folder), "version": 9})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["message"]

    assert "holds no *.safetensors file" in await refusal(tmp_path / "nowhere")
    for index, (reason, tensors) in enumerate(bad.items()):
        folder = tmp_path / str(index)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        message = await refusal(folder)
        assert reason in message and str(folder) in message
    (tmp_path / "0" / "model.safetensors").write_bytes(b"garbage")
    assert "can't be read" in await refusal(tmp_path / "0")
    answer = await site.generate(prompt_of(10), max_tokens=5)
    assert answer["policy_version"] == 0
    site.assert_scored(prompt_of(10), answer)


@on_site
async def test_prompt_logprobs_are_those_of_one_plain_forward_at_temperature_one(site: Site) -> None:
    prompts = [prompt_of(length) for length in (1, 2, 40, 90, 40, 7)]
    asked = {"max_tokens": 1, "temperature": 0.5, "prompt_logprobs": 1}
    answers = await asyncio.gather(*(site.generate(prompt, **asked) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        first, *entries = answer["prompt_logprobs"]
        assert first is None
        given = [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=True)]
        assert given == pytest.approx(score(site.policies[0], prompt[:1], prompt[1:]), abs=1e-4)
        site.assert_scored(prompt, answer, temperature=0.5)
    assert "prompt_logprobs" not in await site.generate(prompts[0], max_tokens=1)


@on_site
async def test_as_many_of_the_likeliest_tokens_as_are_asked_for_stand_beside_the_prompts_own(site: Site) -> None:
    prompts = [prompt_of(length) for length in (3, 30, 30)]
    answers = await asyncio.gather(
        *(site.generate(prompt, max_tokens=1, prompt_logprobs=k) for prompt, k in zip(prompts, (8, 3, 0), strict=True))
    )
    for prompt, k, answer in zip(prompts, (8, 3, 0), answers, strict=True):
        with torch.no_grad():
            expected = site.policies[0](torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        for place, entry in enumerate(answer["prompt_logprobs"][1:]):
            likeliest = {str(token) for token in expected[place].topk(k).indices.tolist()}
            assert set(entry) == likeliest | {str(prompt[place + 1])}
            found = {token: one["logprob"] for token, one in entry.items()}
            assert found == pytest.approx({token: float(expected[place, int(token)]) for token in found}, abs=1e-4)


@on_site
async def test_text_and_tokens_are_those_of_the_models_own_tokenizer(site: Site) -> None:
    tokenizer, text = load_tokenizer(site.folders[0]), "Reverse: abcd<|im_end|>\n"
    answer = await site.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert (answer.json()["tokens"], answer.json()["count"]) == (tokens, len(tokens))
    answer = await site.http.post("/detokenize", json={"tokens": tokens})
    assert answer.json() == {"prompt": text}
    refused = await site.http.post("/detokenize", json={"tokens": [PAST_VOCABULARY]})
    assert refused.status_code == 400


@on_site
async def test_chat_is_the_token_route_with_text_around_it(site: Site) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in ("Reverse: ", "abcd")]}],
        "temperature": 0,
        "max_tokens": 5,
        "logprobs": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = await site.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.headers[VERSION_HEADER] == "0"
    chat = answer.json()
    tokenizer = load_tokenizer(site.folders[0])
    prompt = tokenizer.encode(
        "<|im_start|>user\nReverse: abcd<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    tokens = (await site.generate(prompt, temperature=0, max_tokens=5))["choices"][0]["token_ids"]
    (choice,) = chat["choices"]
    assert choice["message"] == {"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)}
    assert len(choice["logprobs"]["content"]) == len(tokens)
    assert chat["object"] == "chat.completion" and chat["policy_version"] == 0
    assert chat["usage"]["prompt_tokens"] == len(prompt) and chat["usage"]["completion_tokens"] == len(tokens)
    refused = await site.http.post("/v1/chat/completions", json=body | {"messages": [{"role": "user"}]})
    assert refused.status_code == 400 and "chat template" in refused.json()["error"]["message"]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@on_site
async def test_chat_gives_the_likeliest_tokens_at_each_place_after_temperature(site: Site, temperature: float) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Reverse: abcd"}],
        "max_tokens": 6,
        "temperature": temperature,
        "logprobs": True,
        "top_logprobs": 5,
    }
    answer = await site.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["logprobs"]["content"]
    tokenizer = load_tokenizer(site.folders[0])
    ids = tokenizer.encode("<|im_start|>user\nReverse: abcd<|im_end|>\n<|im_start|>assistant\n")
    for entry in content:
        logits = site.policies[0](input_ids=torch.tensor([ids])).logits[0, -1].float()
        expected = torch.log_softmax(logits / (temperature or 1.0), dim=-1).topk(5)
        found = [int(one["token"].removeprefix("token_id:")) for one in entry["top_logprobs"]]
        assert found == expected.indices.tolist()
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(expected.values.tolist(), abs=1e-4)
        ids = [*ids, int(entry["token"].removeprefix("token_id:"))]
    refused = await site.http.post("/v1/chat/completions", json=body | {"top_logprobs": 65})
    assert refused.status_code == 400 and "from 0 to 64" in refused.json()["error"]["message"]


@on_site
async def test_a_request_that_outlasts_the_server_is_answered_with_503(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn cancels what is under way after its grace, and prints a traceback of whatever lets that through."""

    begun = asyncio.Event()

    async def never(*args: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(site.engine, "generate", never)
    asking = asyncio.ensure_future(site.generate([1, 2, 3], status=503))
    await begun.wait()
    asking.cancel()
    assert "before its answer was complete" in (await asking)["error"]["message"]
