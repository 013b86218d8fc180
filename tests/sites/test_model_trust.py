"""A model brings weights as safetensors and no code: what else lies in its folder is neither run nor unpacked."""

import builtins
import json
from pathlib import Path

import pytest
import torch

from composer_prime.errors import ModelError
from composer_prime.sites.embedded.model import load_policy, resolve_model
from composer_prime.sites.embedded.shapes import named_shapes
from tests.sites.tiny_folder import save_random_tiny


def test_a_model_s_own_code_is_not_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker = save_random_tiny(tmp_path / "model"), tmp_path / "marker"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()\nclass Evil: pass\n")
    monkeypatch.setattr(builtins, "input", lambda text="": "y")  # transformers would ask, and somebody say yes
    with pytest.raises(ModelError):
        named_shapes(str(folder))
    with pytest.raises(ModelError):
        load_policy(folder)
    assert not marker.exists()


def test_weights_that_are_pickled_are_refused(tmp_path: Path) -> None:
    folder = save_random_tiny(tmp_path / "model")
    torch.save(load_policy(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        resolve_model(str(folder), 0, tmp_path / "cache")
    with pytest.raises(ModelError):
        load_policy(folder)
