"""From a model's name to a folder and a policy, and what the tiny model knows before RL."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_prime.errors import ModelError
from composer_prime.sites.embedded import model as model_module
from composer_prime.sites.embedded.model import load_policy, resolve_model
from composer_prime.sites.embedded.tiny import tiny_config, tiny_tokenizer
from composer_prime.sites.embedded.warmup import LENGTH, WarmUp, prompt_text, warm_up
from composer_prime.sites.embedded.warmup_config import SORT_WARM_UP, WarmUpConfig
from tests.patience import PATIENCE_S
from tests.sites.tiny_folder import build_together, save_random_tiny, score

RENDERER = create_renderer(tiny_tokenizer(), Qwen3RendererConfig(enable_thinking=False))
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def no_warm_up(model, tokenizer, seed, config=None, progress=None) -> WarmUp:
    return WarmUp(steps=0, accuracy=0.0)


@pytest.mark.parametrize("verb", ["Reverse", "Sort"])
def test_warm_up_prompts_are_what_the_renderer_writes(verb: str) -> None:
    rendered = RENDERER.render_ids([{"role": "user", "content": f"{verb}: abfc"}], add_generation_prompt=True)
    assert tiny_tokenizer().encode(prompt_text(verb, "abfc"), add_special_tokens=False) == rendered


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chat_template_and_renderer_write_the_same_without_thinking(tools: list | None) -> None:
    tokenizer = tiny_tokenizer()
    for messages in (CONVERSATION[:2], CONVERSATION[1:2], CONVERSATION[:4], CONVERSATION):
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        rendered = RENDERER.render_ids(messages, tools=tools, add_generation_prompt=True)
        assert tokenizer.encode(str(text), add_special_tokens=False) == rendered


def test_chat_template_writes_tool_calls_and_their_results() -> None:
    text = tiny_tokenizer().apply_chat_template(CONVERSATION, tokenize=False)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>\n' in text
    assert "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>user\nThanks" in text


def test_tokenizer_is_one_token_a_byte_and_reads_back_any_text() -> None:
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == tiny_config().vocab_size == 265
    text = "naïve 日本 \n\t<think>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len("naïve 日本 \n\t".encode()) + 1
    assert tokenizer.decode(ids) == text


def test_saved_tokenizer_is_the_same_tokenizer(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)
    text = prompt_text("Reverse", "abcd")
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(text, add_special_tokens=False) == tiny_tokenizer().encode(text, add_special_tokens=False)
    assert loaded.eos_token == "<|im_end|>"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_warm_policy_is_right_a_third_of_the_time(seed: int, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    folder = resolve_model("tiny", seed, tmp_path, progress=lambda step, accuracy: seen.append((step, accuracy)))
    policy = load_policy(folder)
    lowest, highest = WarmUpConfig().accuracy
    assert seen and lowest <= seen[-1][1] <= highest
    assert resolve_model("tiny", seed, tmp_path, progress=lambda *_: pytest.fail("built twice")) == folder
    tokenizer = tiny_tokenizer()
    words = ["".join("abcdef"[(index // 6**place) % 6] for place in range(LENGTH)) for index in range(0, 6**LENGTH, 13)]

    def accuracy(verb: str, answers: list[str]) -> float:
        right = [
            sum(score(policy, tokenizer.encode(prompt_text(verb, word)), tokenizer.encode(f"{answer}<|im_end|>")))
            for word, answer in zip(words, answers, strict=True)
        ]
        return float(torch.tensor(right).exp().mean())

    assert lowest - 0.04 <= accuracy("Reverse", [word[::-1] for word in words]) <= highest + 0.04
    assert accuracy("Sort", ["".join(sorted(word)) for word in words]) > 0.02  # enough for RL to start from


@pytest.mark.slow
def test_tiny_sort_has_just_begun_to_sort_words_of_eight_letters(tmp_path: Path) -> None:
    policy, tokenizer = load_policy(resolve_model("tiny-sort", 0, tmp_path)), tiny_tokenizer()
    words = [
        "".join("abcdefgh"[(index // 8**place) % 8] for place in range(LENGTH)) for index in range(0, 8**LENGTH, 31)
    ]

    def right(answer: Callable[[str], str]) -> float:
        each = [
            sum(
                score(
                    policy, tokenizer.encode(prompt_text("Sort", word)), tokenizer.encode(f"{answer(word)}<|im_end|>")
                )
            )
            for word in words
        ]
        return float(torch.tensor(each).exp().mean())

    lowest, highest = SORT_WARM_UP.accuracy
    assert lowest / 2 <= right(lambda word: "".join(sorted(word))) <= 2 * highest
    assert right(lambda word: word) < lowest


def test_models_that_are_loaded_in_two_threads_are_loaded_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, together, lock = save_random_tiny(tmp_path), [0], threading.Semaphore(1)
    load = AutoModelForCausalLM.from_pretrained

    def alone(*given: object, **settings: object) -> object:
        together[0] += not lock.acquire(blocking=False)
        time.sleep(0.2)
        lock.release()
        return load(*given, **settings)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", alone)
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(load_policy, [folder] * 4))
    assert together == [0]
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in models)


def test_warm_up_that_never_gets_there_says_so(tmp_path: Path) -> None:
    policy = load_policy(save_random_tiny(tmp_path))
    with pytest.raises(ModelError, match=r"run\.seed 7.*within 15 steps: choose another run\.seed"):
        warm_up(policy, tiny_tokenizer(), 7, WarmUpConfig(max_steps=15))


def test_tiny_model_depends_on_the_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_prime.sites.embedded.warmup.warm_up", no_warm_up)
    one, again, other = (
        resolve_model("tiny", seed, tmp_path / cache) for seed, cache in ((0, "one"), (0, "again"), (1, "one"))
    )
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert not list((tmp_path / "one").glob(".*")), "scratch folders are removed"


def test_a_tiny_model_that_is_there_is_found_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_prime.sites.embedded.warmup.warm_up", no_warm_up)
    folder = resolve_model("tiny", 0, tmp_path)
    code = """
import sys
from composer_prime.sites.embedded.model import main
sys.modules |= {"torch": None, "transformers": None}
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "tiny", "0", str(tmp_path), "cpu"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines() == [str(folder)]


def test_two_processes_that_build_the_same_model_both_get_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=build_together, args=(tmp_path, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    folders = {results.get(timeout=PATIENCE_S) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(folders) == 1
    assert load_policy(Path(folders.pop())).config.hidden_size == 128


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"can't be kept in .*file.*XDG_CACHE_HOME"):
        resolve_model("tiny", 0, tmp_path / "file" / "cache")


def test_policy_is_fp32_and_can_be_trained(tmp_path: Path) -> None:
    policy = load_policy(save_random_tiny(tmp_path))
    assert not policy.training
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert policy.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("removed", "missing"),
    [
        (["config.json"], r"it lacks config\.json: "),
        (["tokenizer.json", "tokenizer_config.json"], r"it lacks a tokenizer \(tokenizer\.json\): "),
        (["model.safetensors"], r"it lacks weights \(model\.safetensors\): "),
        (["config.json", "model.safetensors"], r"it lacks config\.json and weights"),
    ],
)
def test_folder_that_is_no_model_is_named_with_what_it_lacks(removed: list[str], missing: str, tmp_path: Path) -> None:
    folder = save_random_tiny(tmp_path / "model")
    assert resolve_model(str(folder), 0, tmp_path) == folder
    for name in removed:
        os.remove(folder / name)
    with pytest.raises(ModelError, match=missing) as caught:
        resolve_model(str(folder), 0, tmp_path)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere/", "../nowhere"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(model_module, "_download", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=f"model.name \\({name}\\) doesn't exist"):
        resolve_model(name, 0, tmp_path)


def test_hub_id_that_cannot_be_had_shows_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"some-org/no-model.*can't be downloaded.*(offline|HF_HUB_OFFLINE|cache)"):
        resolve_model("some-org/no-model", 0, tmp_path)
    with pytest.raises(ModelError, match=r"a b c.*can't be downloaded.*HFValidationError"):
        resolve_model("a b c", 0, tmp_path)


def test_weights_that_cannot_be_read_are_a_model_error(tmp_path: Path) -> None:
    folder = save_random_tiny(tmp_path)
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ModelError, match=f"{folder} can't be loaded"):
        load_policy(folder)


def test_command_prints_the_folder_last_or_exits_with_two(tmp_path: Path) -> None:
    folder = save_random_tiny(tmp_path / "model")
    command, where = [sys.executable, "-m", "composer_prime.sites.embedded.model"], ["0", str(tmp_path), "cpu"]
    found = subprocess.run([*command, str(folder), *where], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.splitlines()[-1]) == (0, str(folder))
    lost = subprocess.run([*command, "./nowhere", *where], capture_output=True, text=True, check=False)
    assert lost.returncode == 2
    assert lost.stderr.splitlines()[-1].startswith("error: model.name (./nowhere) doesn't exist")
    assert "Traceback" not in lost.stderr
