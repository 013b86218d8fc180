"""What can't work ends upstream's unmodified trainer with one line and exit code 2; the run is left as it was."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from composer_prime.sites.prime_rl import versions
from tests.sites.prime_rl.launched import announced
from tests.sites.prime_rl.real_runs import RealTrainer, feed, real_site, save_model, source_path, upstream

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A run that waits for its first site."""
    return announced(tmp_path / "bucket")


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[RealTrainer], str]:
    """`refused(trainer)`: the one line that it ended with, before a step was made."""

    def content() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in (tmp_path / "bucket").rglob("*") if file.is_file()}

    def run(trainer: RealTrainer) -> str:
        before = content()
        code, output = trainer.start().wait()
        assert code == 2, output
        lines = [line for line in output.splitlines() if line.startswith("composer-prime: ")]
        assert len(lines) == 1 and "Traceback" not in output and "Step 1 |" not in output, output
        assert content() == before
        assert not any((trainer.folder / name).exists() for name in ("broadcasts", "checkpoints", "outer"))
        return lines[0]

    return run


def test_full_offload_is_refused(model: Path, uri: str, tmp_path: Path, refused: Callable[[RealTrainer], str]) -> None:
    if upstream() is not versions.MAIN:
        pytest.skip("PRIME-RL before 559b447 has no full_offload")
    offload = {"cpu_optimizer_backend": "torch", "numa_bind": False}
    said = refused(real_site(tmp_path, "a", model, uri, model={"full_offload": offload}, optim={"max_norm": None}))
    assert "trainer.model.full_offload must be off" in said and "optim_cpu_offload" in said


def test_outer_settings_without_a_store_are_refused(
    model: Path, tmp_path: Path, refused: Callable[[RealTrainer], str]
) -> None:
    trainer = real_site(tmp_path, "a", model, None)
    trainer.env["COMPOSER_PRIME_SITE"] = "a"
    said = refused(trainer)
    assert "COMPOSER_PRIME_SITE is set (a) and COMPOSER_PRIME_OUTER isn't" in said


def test_a_store_without_a_run_is_refused(model: Path, tmp_path: Path, refused: Callable[[RealTrainer], str]) -> None:
    assert "holds no run" in refused(real_site(tmp_path, "a", model, str(tmp_path / "bucket")))


@dataclass(frozen=True)
class Broken:
    """One piece of the seam, broken: each `old` in the first of these files that is there becomes its `new`."""

    files: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]
    named: str


TRAIN, DATA = ("trainer/rl/train.py",), ("trainer/rl/data.py",)
BROKEN = {
    "a renamed function": Broken(
        TRAIN,
        (("import setup_optimizer", "import setup_optimizer as make_optimizer"), ("= setup_opt", "= make_opt")),
        "lacks setup_optimizer(named_params)",
    ),
    "another parameter": Broken(
        ("trainer/optim/__init__.py", "trainer/optim.py"),
        (("named_params", "params"),),
        "setup_optimizer(named_params)",
    ),
    "a loader of other shape": Broken(DATA, (("dp_world_size", "num_ranks"),), "lacks DataLoader(dp_world_size)"),
    "batches by another name": Broken(DATA, (("def get_batch", "def next_batch"),), "lacks DataLoader.get_batch"),
    "checkpoints by another name": Broken(
        ("trainer/ckpt.py",), (("    def load(", "    def restore("),), "lacks CheckpointManager.load(step)"
    ),
    "another record": Broken(
        ("trainer/rl/loss.py",),
        (('    loss: Float[Tensor, ""]', '    value: Float[Tensor, ""]'),),
        "LossOutputs(loss, me",
    ),
}
BEFORE_ITS_OPTIMIZER = Broken(
    TRAIN,
    (("        optimizer.step()\n", "        scheduler.step()\n        optimizer.step()\n"),),
    "came to scheduler.step on rank 0 without calling optimizer.step first",
)


def broken_site(broken: Broken, folder: Path, model: Path, uri: str) -> RealTrainer:
    """A site on a copy of the checkout in which that piece is broken."""
    shutil.copytree(source_path()[0], folder / "changed")
    file = next(path for path in (folder / "changed" / "prime_rl" / name for name in broken.files) if path.exists())
    text = file.read_text()
    for old, new in broken.changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    trainer = real_site(folder, "a", model, uri)
    trainer.path = (folder / "changed",)
    return trainer


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_piece_is_refused_by_name(
    broken: Broken, model: Path, uri: str, tmp_path: Path, refused: Callable[[RealTrainer], str]
) -> None:
    said = refused(broken_site(broken, tmp_path, model, uri))
    assert broken.named in said and versions.TESTED in said


def test_a_scheduler_before_its_optimizer_is_refused(model: Path, uri: str, tmp_path: Path) -> None:
    trainer = broken_site(BEFORE_ITS_OPTIMIZER, tmp_path, model, uri)
    feed(trainer)
    code, output = trainer.start().wait()
    assert code == 2 and BEFORE_ITS_OPTIMIZER.named in output and "Step 1 |" not in output


def test_a_version_that_nobody_tested_runs(model: Path, uri: str, tmp_path: Path) -> None:
    for version in ("0.9.0", "1.4.2"):
        trainer = real_site(tmp_path / version, "a", model, uri, max_steps=2, ckpt=None)
        told = tmp_path / version / "told" / f"prime_rl-{version}.dist-info" / "METADATA"
        told.parent.mkdir(parents=True)
        told.write_text(f"Metadata-Version: 2.1\nName: prime-rl\nVersion: {version}\n")
        trainer.path = (told.parents[1],)
        feed(trainer, last=2)
        assert "joined uri=" in trainer.start().finish()
