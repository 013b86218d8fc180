"""Who joins a run needs no weights of the model but the run's masters: what isn't downloaded, and what that asks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from composer_prime.config.settings import WITHOUT_WEIGHTS, SiteSettings, settle_site
from composer_prime.errors import ConfigError, ModelError
from composer_prime.sites.embedded.inference.reload import read_weights
from composer_prime.sites.embedded.local_run import joining_model_command, model_command
from composer_prime.sites.embedded.model import load_policy
from composer_prime.sites.embedded.trainer import build
from composer_prime.store import open_store
from tests.bench.join.hub import NAME, Hub, make_model
from tests.config.recipes import recipe
from tests.servers.in_thread import serving_handler
from tests.sites.tiny_folder import save_random_tiny

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}


class Hosting(Hub):
    """A hub that notes which files were asked for."""

    fetched: list[str]

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            self.fetched.append(self.path.rpartition("/")[2])
        super().do_GET()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """(URL, names of the files that were fetched) of a hub with one small model."""
    make_model(tmp_path / "made", **SMALL)
    (tmp_path / "made" / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    Hosting.folder, Hosting.fetched = tmp_path / "made", []
    with serving_handler(Hosting) as url:
        yield url, Hosting.fetched


def resolved(home: Path, url: str, *asked: str) -> Path:
    """What the model's process prints, on a machine whose hub cache is `home`."""
    command = [sys.executable, "-m", "composer_prime.sites.embedded.model", NAME, "0", str(home / "cache"), "cpu"]
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home)}
    done = subprocess.run([*command, *asked], env=environment, check=True, capture_output=True, text=True)
    return Path(done.stdout.splitlines()[-1])


def test_weights_that_are_not_here_are_spared_and_those_that_are_here_are_used(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, fetched = hub
    spared = resolved(tmp_path / "home", url, WITHOUT_WEIGHTS)
    assert "config.json" in fetched and "model.safetensors" not in fetched
    assert (spared / WITHOUT_WEIGHTS).exists() and not list(spared.glob("*.safetensors"))
    assert resolved(tmp_path / "home", url, WITHOUT_WEIGHTS) == spared, "the second time as well"
    whole = resolved(tmp_path / "home", url)
    assert fetched.count("model.safetensors") == 1
    assert resolved(tmp_path / "home", url, WITHOUT_WEIGHTS) == whole, "no masters are waited for where they are"
    ours, theirs = load_policy(spared), load_policy(whole)
    assert {name: value.shape for name, value in ours.named_parameters()} == {
        name: value.shape for name, value in theirs.named_parameters()
    }
    assert ours.dtype == theirs.dtype == torch.float32 and not ours.training
    assert ours.generation_config.eos_token_id == theirs.generation_config.eos_token_id == [258, 256]
    assert len(AutoTokenizer.from_pretrained(spared)) == len(AutoTokenizer.from_pretrained(whole))
    read_weights(whole, ours)  # as a trainer's broadcast, it fits


def test_vllm_starts_from_weights_and_so_they_are_not_spared() -> None:
    plain, vllm = recipe(), recipe(inference={"engine": "vllm"})
    assert joining_model_command(plain) == [*model_command(plain), WITHOUT_WEIGHTS]
    assert joining_model_command(vllm) == model_command(vllm)


def test_the_first_policy_that_hints_ask_is_not_spared_and_one_on_a_server_is() -> None:
    own, elsewhere = recipe(hints={}), recipe(hints={"base_url": "https://teacher.example.org"})
    live = recipe(hints={"teacher": "live", "allow_live": True})
    assert joining_model_command(own) == model_command(own)
    assert joining_model_command(elsewhere) == [*model_command(elsewhere), WITHOUT_WEIGHTS]
    assert joining_model_command(live) == [*model_command(live), WITHOUT_WEIGHTS]


def settings_without_weights(folder: Path) -> SiteSettings:
    model = save_random_tiny(folder / "model")
    (model / "model.safetensors").unlink()
    (model / WITHOUT_WEIGHTS).touch()
    outer = {"store": str(folder / "bucket"), "inner_steps": 4}
    made = recipe(output_dir=str(folder / "out"), outer=outer)
    return settle_site(made, "a", inference_port=1, model_dir=model, resume=False)


def test_no_run_is_made_from_a_model_without_weights(tmp_path: Path) -> None:
    settings = settings_without_weights(tmp_path)
    trainer = build(settings)
    try:
        with pytest.raises(ConfigError, match="holds no run any more, and this site came without weights"):
            trainer.start()
    finally:
        trainer.close()
    assert open_store(settings.run_uri or "").list("") == []


def test_a_model_that_keeps_values_beside_its_parameters_needs_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_buffer(folder: Path, device: str) -> torch.nn.Module:
        model = load_policy(folder)
        model.register_buffer("score_bias", torch.zeros(3))
        return model

    monkeypatch.setenv("HF_HOME", "/lent")
    monkeypatch.setattr("composer_prime.sites.embedded.model.load_policy", with_buffer)
    with pytest.raises(
        ModelError, match=r"no master holds \(1, such as score_bias\): download it first, `HF_HOME=/lent hf"
    ):
        build(settings_without_weights(tmp_path))
