"""Hints' teacher "ema": the trainer makes the average, checkpoints keep it, and the site's server scores with it."""

import shutil
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from composer_prime.config import SiteSettings
from composer_prime.config.paths import AVERAGE
from composer_prime.sites.embedded.batches import write_batch
from composer_prime.sites.embedded.broadcasts import move_average, publish, start_average, weights
from composer_prime.sites.embedded.model import load_policy
from composer_prime.sites.embedded.trainer import Trainer
from tests.sites.letters_site import letters_site
from tests.sites.served_policy import serving_policy
from tests.sites.test_trainer import FakeOuter
from tests.sites.tiny_folder import save_random_tiny, score
from tests.sites.tiny_policy import random_policy, random_samples

DECAY = 0.75


def trained(root: Path, steps: int, *, resume: bool = False, hints: dict | None = None) -> SiteSettings:
    """Train a tiny policy up to so many steps in all, on batches that are the same every time."""
    settings = letters_site(
        root,
        max_steps=steps,
        resume=resume,
        seq_len=32,
        trainer={"optim": {"lr": 1e-2}},
        ckpt={"interval": 2},
        hints={"teacher": "ema", "ema_decay": DECAY} if hints is None else hints,
    )
    for step in range(steps):
        write_batch(settings.paths.rollouts, step, random_samples(100 + step, 4))
    trainer = Trainer(settings, random_policy(), None)
    try:
        trainer.start()
        assert trainer.train() is not None
    finally:
        trainer.close()
    return settings


def average_of(settings: SiteSettings, version: int) -> dict[str, Tensor]:
    return load_file(settings.paths.broadcast(version) / AVERAGE / "model.safetensors")


def test_each_step_the_average_is_decay_times_itself_and_the_rest_the_policy(tmp_path: Path) -> None:
    settings = trained(tmp_path, 3)
    wanted = {name: value.double() for name, value in weights(random_policy()).items()}
    assert "lm_head.weight" not in wanted  # tied: counted once
    for version in (1, 2, 3):
        policy = load_file(settings.paths.broadcast(version) / "model.safetensors")
        for name, value in wanted.items():
            value.mul_(DECAY).add_(policy[name].double(), alpha=1 - DECAY)
        found = average_of(settings, version)
        assert found.keys() == wanted.keys() == policy.keys()
        for name, value in found.items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), wanted[name], rtol=0, atol=1e-6)
            assert not torch.equal(value, policy[name])


def test_an_average_of_a_half_precision_policy_is_fp32_and_moves_by_less_than_that_resolves() -> None:
    model = random_policy().bfloat16()
    average = start_average(model)
    before = {name: value.clone() for name, value in average.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-6)
    move_average(average, model, 0.999)
    for name, value in average.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, before[name] * 0.999 + weights(model)[name] * 0.001)
    assert any(not torch.equal(value, before[name]) for name, value in average.items())


def test_a_killed_run_that_is_resumed_has_the_same_average(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 4)
    killed = trained(tmp_path / "killed", 3)
    shutil.rmtree(killed.paths.checkpoint(3))  # it was killed between checkpoints: the last is of step 2
    killed.paths.result.unlink()
    resumed = trained(tmp_path / "killed", 4, resume=True)
    for version in (2, 3, 4):
        for name, value in average_of(whole, version).items():
            assert torch.equal(value, average_of(resumed, version)[name])


class Joined(FakeOuter):
    """An outer loop whose masters are three times the weights that the site has at first."""

    def join(self, named_parameters) -> None:
        super().join(named_parameters)
        with torch.no_grad():
            for _, parameter in named_parameters:
                parameter.mul_(3)


def test_who_joins_a_run_begins_the_average_at_its_masters(tmp_path: Path) -> None:
    settings = letters_site(tmp_path, seq_len=32, hints={"teacher": "ema"}, outer={"inner_steps": 8})
    trainer = Trainer(settings, random_policy(), Joined())  # pyright: ignore[reportArgumentType]
    try:
        trainer.start()
    finally:
        trainer.close()
    masters = load_file(settings.paths.broadcast(0) / "model.safetensors")
    first = weights(random_policy())
    for name, value in average_of(settings, 0).items():
        assert torch.equal(value, masters[name]) and not torch.equal(value, first[name])


@pytest.mark.parametrize("hints", [{}, {"teacher": "live", "allow_live": True}], ids=["frozen", "live"])
def test_no_average_is_made_for_other_teachers(tmp_path: Path, hints: dict) -> None:
    settings = trained(tmp_path, 1, hints=hints)
    assert not (settings.paths.broadcast(1) / AVERAGE).exists()


def test_the_server_scores_with_the_average_of_the_newest_broadcast_also_after_it_was_restarted(tmp_path: Path) -> None:
    first = save_random_tiny(tmp_path / "first")
    policy = load_policy(save_random_tiny(tmp_path / "later", seed=1))
    average = start_average(load_policy(first))
    move_average(average, policy, 0.5)
    broadcast = publish(policy, tmp_path / "broadcasts", 7, average)
    averaged = load_policy(first)
    averaged.load_state_dict(average, strict=False)
    prompt = [(5 * place) % 200 + 1 for place in range(12)]

    def scored(http: httpx.Client, name: str) -> list[float]:
        sampling = {"max_tokens": 1, "prompt_logprobs": 0}
        body = {"model": name, "token_ids": prompt, "sampling_params": sampling}
        answer = http.post("/inference/v1/generate", json=body).raise_for_status().json()
        entries = zip(answer["prompt_logprobs"][1:], prompt[1:], strict=True)
        return [entry[str(token)]["logprob"] for entry, token in entries]

    def said(model) -> list[float]:
        return score(model, prompt[:1], prompt[1:])

    for _ in range(2):
        with (
            serving_policy(first, held={"ema": first}) as port,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
        ):
            assert scored(http, "policy@ema") == pytest.approx(said(load_policy(first)), abs=1e-4)
            for _ in range(2):  # told twice, as a watcher does that had no answer
                http.post("/update_weights", json={"weight_dir": str(broadcast), "version": 7}).raise_for_status()
            assert http.get("/health").json()["policy_version"] == 7
            assert scored(http, "policy@ema") == pytest.approx(said(averaged), abs=1e-4)
            assert scored(http, "policy") == pytest.approx(said(policy), abs=1e-4)


def test_a_broadcast_without_the_average_is_refused_and_both_stay(tmp_path: Path) -> None:
    folder = save_random_tiny(tmp_path / "first")
    broadcast = publish(load_policy(folder), tmp_path / "broadcasts", 7)
    with (
        serving_policy(folder, held={"ema": folder}) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):
        answer = http.post("/update_weights", json={"weight_dir": str(broadcast), "version": 7})
        assert answer.status_code == 400 and "ema) holds no *.safetensors file" in answer.text
        assert http.get("/health").json()["policy_version"] == 0
