"""A disk that lies: what doesn't come back as it was written is named and not loaded, and the one before is taken."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from composer_prime.errors import CorruptObject
from composer_prime.sites.embedded.checkpoints import newest_checkpoint
from composer_prime.sites.embedded.model import resolve_model
from composer_prime.sites.embedded.supervisor import SiteSupervisor
from composer_prime.sites.embedded.whole_folder import numbered_steps
from composer_prime.sync.journal import FileJournal
from tests.sites.fake_site import fake_roles
from tests.sites.test_trainer import assert_same_weights, run_trainer, settle, write_batches


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def junk(path: Path, _: int) -> None:
    path.write_bytes(b"\x80\x02}q\x00." + b"\xff" * 40)


def cut(path: Path, bit: int) -> None:
    path.write_bytes(path.read_bytes()[: bit % path.stat().st_size])


def gone(path: Path, _: int) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A site's folder with the checkpoints of its steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    settings = settle(folder, steps=4, interval=2)
    write_batches(settings, 5)
    run_trainer(settings)
    return folder


@pytest.mark.parametrize("harm", [flip, junk, cut, gone])
def test_a_site_resumes_from_the_checkpoint_before_one_that_is_damaged(saved, tmp_path, harm, caplog):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    settings = settle(tmp_path, steps=5, resume=True)
    seed = random.randrange(1 << 30)
    for file in sorted(settings.paths.checkpoint(4).iterdir()):
        bit = random.Random(seed).randrange(8 * file.stat().st_size)
        whole = file.read_bytes()
        harm(file, bit)
        with pytest.raises(CorruptObject, match=r"step_4.*delete"):
            newest_checkpoint(settings.paths.checkpoints)
        file.write_bytes(whole)
    harm(settings.paths.checkpoint(4) / "state.pt", bit)

    supervisor = SiteSupervisor(settings, command=fake_roles())
    supervisor.start()
    supervisor.stop()
    assert "step_4 is damaged" in caplog.text and numbered_steps(settings.paths.checkpoints) == [2], f"seed {seed}"
    resumed, _ = run_trainer(settings, seed=1)
    undamaged = settle(tmp_path / "undamaged", steps=5)
    write_batches(undamaged, 5)
    assert_same_weights(resumed.model, run_trainer(undamaged)[0].model)


def test_a_site_whose_checkpoints_are_all_damaged_says_so(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    settings = settle(tmp_path, steps=5, resume=True)
    for step in numbered_steps(settings.paths.checkpoints):
        flip(settings.paths.checkpoint(step) / "state.pt", 8000)
    supervisor = SiteSupervisor(settings, command=fake_roles())
    with pytest.raises(CorruptObject, match=r"none of the checkpoints in .* is what was written"):
        supervisor.start()
    supervisor.stop()
    assert not supervisor.children and numbered_steps(settings.paths.checkpoints) == [2, 4]


def test_a_residual_with_a_flipped_bit_counts_as_none(tmp_path, caplog):
    journal = FileJournal(tmp_path)
    residual = torch.full((64,), 1.6e-6)
    journal.write(0, "payload/a-0123456789abcdef", residual)
    read = journal.read(0, "payload/a-0123456789abcdef")
    assert read is not None and torch.equal(read, residual)
    (file,) = tmp_path.glob("*.safetensors")
    flip(file, 8 * (file.stat().st_size - 1) + 6)  # an exponent's bit: 1.6e-6 becomes 5e32
    assert journal.read(0, "payload/a-0123456789abcdef") is None and "journal_damaged" in caplog.text


@pytest.mark.slow
def test_a_cached_model_with_a_flipped_bit_is_made_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tiny_policy.built_in.letters.warm_up", lambda *_: None)
    folder = resolve_model("tiny", 3, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    flip(folder / "model.safetensors", 8 * len(whole) - 2)
    assert resolve_model("tiny", 3, tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == whole and "is damaged" in capsys.readouterr().err
