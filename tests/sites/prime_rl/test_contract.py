"""What the seam needs of upstream's trainer, and nothing else: broken pieces are refused by name, new versions run.

The stand-in is changed as upstream might change: a name, a parameter, a record, the order of calls.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from composer_prime.sites.prime_rl import versions
from tests.sites.prime_rl.launched import announced
from tests.sites.prime_rl.standin_runs import STANDIN, site

pytestmark = pytest.mark.slow

TRAIN, LOSS, CKPT, MONITORS = "trainer/rl/train.py", "trainer/rl/loss.py", "trainer/ckpt.py", "monitors/__init__.py"
MAKES_OPTIMIZER = "    optimizer, _ = setup_optimizer("
MAKES_LOADER = "    dataloader = FakeDataLoader(config.data, LENGTH, dist.get_world_size())\n"
UNSEEN_LOADER = MAKES_LOADER.replace("FakeDataLoader(", "FakeDataLoader.__mro__[1](")
EARLY_LOADER = f"    progress = Progress()\n    config.data.start_step = 0\n{MAKES_LOADER}"


@dataclass(frozen=True)
class Broken:
    """One piece of the seam, broken: every `old` in a file becomes `new`, and `named` stands in the refusal."""

    file: str
    old: str
    new: str
    named: str


BROKEN = {
    "a renamed function": Broken(TRAIN, "setup_optimizer", "make_optimizer", "lacks setup_optimizer(named_params)"),
    "another parameter": Broken(TRAIN, "named_params", "params", "lacks setup_optimizer(named_params)"),
    "a loader of other shape": Broken(TRAIN, "dp_world_size", "num_ranks", "DataLoader(dp_world_size)"),
    "batches by another name": Broken(TRAIN, "get_batch", "next_batch", "DataLoader.get_batch"),
    "counters by another name": Broken(TRAIN, "progress", "counters", "lacks progress in train"),
    "checkpoints by another name": Broken(CKPT, "def load(", "def restore(", "lacks CheckpointManager.load(step)"),
    "another record": Broken(LOSS, "    loss: Tensor\n", "    value: Tensor\n", "lacks LossOutputs(loss, metrics)"),
    "inputs by another name": Broken(LOSS, "inference_logprobs", "sampler_logprobs", "lacks LossInputs("),
    "other monitors": Broken(MONITORS, "step: int", "at: int", "lacks prime_rl.monitors.log(step)"),
    "a loader before the optimizer": Broken(
        TRAIN, MAKES_OPTIMIZER, EARLY_LOADER + MAKES_OPTIMIZER, "came to DataLoader on rank 0 without calling setup_opt"
    ),
    "a loader that isn't looked up": Broken(TRAIN, MAKES_LOADER, UNSEEN_LOADER, "calling DataLoader f"),
    "no scheduler's step": Broken(TRAIN, "        scheduler.step()\n", "", "without calling scheduler.step first"),
    "a scheduler before the optimizer": Broken(
        TRAIN,
        "        optimizer.step()\n",
        "        scheduler.step()\n        optimizer.step()\n",
        "came to scheduler.step on rank 0 without calling optimizer.step first",
    ),
    "batches without lengths": Broken(TRAIN, '"sequence_lengths"', '"lengths"', "lacks sequence_lengths in its"),
    "a loss made elsewhere": Broken(
        TRAIN,
        "setup_rl_loss_fn(config.loss)",
        "__import__(config.loss.import_path.rpartition('.')[0])",
        "no PRIME-RL's trainer makes its loss here",
    ),
}


def changed(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the stand-in with one file changed, to import from."""
    shutil.copytree(STANDIN, folder)
    path = folder / "prime_rl" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return folder


def calling_itself(folder: Path, version: str) -> Path:
    """What an installed package says of its version, to import from."""
    told = folder / f"prime_rl-{version}.dist-info" / "METADATA"
    told.parent.mkdir(parents=True)
    told.write_text(f"Metadata-Version: 2.1\nName: prime-rl\nVersion: {version}\n")
    return folder


def lines(output: str, opening: str = "composer-prime: ") -> list[str]:
    return [line for line in output.splitlines() if opening in line]


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_piece_is_refused_by_its_name_whatever_the_version_says(broken: Broken, tmp_path: Path) -> None:
    trainer = site(tmp_path, "a", announced(tmp_path / "bucket"))
    told = calling_itself(tmp_path / "told", "0.8.0")
    trainer.path = (changed(tmp_path / "changed", broken.file, broken.old, broken.new), told)
    code, output = trainer.start().wait()
    (said,) = lines(output)
    assert code == 2 and broken.named in said and versions.TESTED in said and "Traceback" not in output
    assert not (trainer.folder / "broadcasts" / "step_2.safetensors").exists()


def test_each_rank_says_what_it_missed_in_its_own_first_step(tmp_path: Path) -> None:
    trainer = site(tmp_path, "a", announced(tmp_path / "bucket"), num_ranks=2, dist_timeout_seconds=20)
    again = (
        "    if dist.get_rank() == 1:\n        setup_scheduler(optimizer, None, None, 0.1)\n    progress = Progress()\n"
    )
    trainer.path = (changed(tmp_path / "changed", TRAIN, "    progress = Progress()\n", again),)
    trainer.start().wait()
    (said,) = lines(trainer.output(1))
    assert "came to setup_scheduler on rank 1 without calling DataLoader first" in said


def test_a_checkpoint_that_is_loaded_past_us_is_refused(tmp_path: Path) -> None:
    trainer = site(tmp_path, "a", announced(tmp_path / "bucket", rounds=3)).start()
    trainer.finish()
    trainer.path = (changed(tmp_path / "changed", TRAIN, "ckpt_manager.load(", "LOAD(ckpt_manager, "),)
    file = trainer.path[0] / "prime_rl" / TRAIN
    file.write_text(file.read_text().replace("VOCABULARY, W", "LOAD = CheckpointManager.load\nVOCABULARY, W"))
    code, output = trainer.start(resume=8, max_steps=12).wait()
    assert code == 2 and "resumes at step 9 and didn't load its checkpoint by CheckpointManager.load" in output


@pytest.mark.parametrize("version", ["0.8.0", "1.4.2"])
def test_a_version_runs_where_it_has_all_that_is_needed_whatever_it_says_of_itself(
    version: str, tmp_path: Path
) -> None:
    trainer = site(tmp_path, "a", announced(tmp_path / "bucket"))
    trainer.path = (calling_itself(tmp_path / "told", version),)
    assert "joined" in trainer.start().finish()


def test_what_the_trainer_is_called_doesnt_matter(tmp_path: Path) -> None:
    trainer = site(tmp_path, "a", announced(tmp_path / "bucket"))
    trainer.path = (changed(tmp_path / "changed", TRAIN, "train(config", "run_training(config"),)
    assert "joined" in trainer.start().finish()
