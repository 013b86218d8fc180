"""From a model's name to a folder and a policy, and what the tiny model knows before RL."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from composer_prime.errors import ModelError
from composer_prime.sites.embedded import model as model_module
from composer_prime.sites.embedded.model import load_policy, named_shapes, resolve_model
from tests.no_makers import hide_makers, said_of
from tests.patience import PATIENCE_S
from tests.sites.tiny_folder import build_together, save_random_tiny
from tiny_policy.built_in.letters import WarmUp


def no_warm_up(model, tokenizer, seed, config=None, progress=None) -> WarmUp:
    return WarmUp(steps=0, accuracy=0.0)


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


def test_tiny_model_depends_on_the_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiny_policy.built_in.letters.warm_up", no_warm_up)
    one, again, other = (
        resolve_model("tiny", seed, tmp_path / cache) for seed, cache in ((0, "one"), (0, "again"), (1, "one"))
    )
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert not list((tmp_path / "one").glob(".*")), "scratch folders are removed"


def test_a_tiny_model_that_is_there_is_found_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiny_policy.built_in.letters.warm_up", no_warm_up)
    folder = resolve_model("tiny", 0, tmp_path)
    code = """
import sys
from composer_prime.sites.embedded.model import main
sys.modules |= {"torch": None, "transformers": None}
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "tiny", "0", str(tmp_path), "cpu"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines() == [str(folder)]


def test_without_its_maker_a_tiny_model_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_makers(tmp_path / "hiding", monkeypatch)
    for asked in (lambda: resolve_model("tiny", 0, tmp_path), lambda: named_shapes("tiny-tools")):
        with pytest.raises(ModelError, match=r"pip install \./envs/tiny_policy"):
            asked()
    command = [sys.executable, "-m", "composer_prime.sites.embedded.model", "tiny-sort", "0", str(tmp_path), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"error: {said_of('tiny-sort')}\n")


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
