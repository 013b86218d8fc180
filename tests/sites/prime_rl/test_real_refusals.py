"""What can't work ends upstream's unmodified trainer with one line and exit code 2; the run is left as it was."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_prime.sites.prime_rl import versions
from tests.sites.prime_rl.launched import announced
from tests.sites.prime_rl.real_runs import RealTrainer, real_site, save_model, upstream

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


def test_full_offload(model: Path, uri: str, tmp_path: Path, refused: Callable[[RealTrainer], str]) -> None:
    if upstream() is not versions.MAIN:
        pytest.skip("PRIME-RL before 559b447 has no full_offload")
    offload = {"cpu_optimizer_backend": "torch", "numa_bind": False}
    said = refused(real_site(tmp_path, "a", model, uri, model={"full_offload": offload}, optim={"max_norm": None}))
    assert "trainer.model.full_offload must be off" in said and "optim_cpu_offload" in said


def test_an_unknown_version(model: Path, uri: str, tmp_path: Path, refused: Callable[[RealTrainer], str]) -> None:
    installed = tmp_path / "site-packages" / "prime_rl-9.9.9.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: prime-rl\nVersion: 9.9.9\n")
    trainer = real_site(tmp_path, "a", model, uri)
    trainer.path = (installed.parent,)
    said = refused(trainer)
    assert "this PRIME-RL is version 9.9.9" in said and versions.TESTED in said


def test_outer_settings_without_a_store(model: Path, tmp_path: Path, refused: Callable[[RealTrainer], str]) -> None:
    trainer = real_site(tmp_path, "a", model, None)
    trainer.env["COMPOSER_PRIME_SITE"] = "a"
    said = refused(trainer)
    assert "COMPOSER_PRIME_SITE is set (a) and COMPOSER_PRIME_OUTER isn't" in said


def test_a_store_without_a_run(model: Path, tmp_path: Path, refused: Callable[[RealTrainer], str]) -> None:
    assert "holds no run" in refused(real_site(tmp_path, "a", model, str(tmp_path / "bucket")))
