"""Upstream's unmodified trainer killed at every stage of a save, as test_real_trainer.py runs it."""

import os
from pathlib import Path

import pytest

from tests.sites.prime_rl.comparing import assert_same
from tests.sites.prime_rl.killed import Stage, check_refused, newest, orchestrator_has_shipped, stages
from tests.sites.prime_rl.launched import announced
from tests.sites.prime_rl.real_runs import RealTrainer, feed, real_site, save_model

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]

STEP = 3
"""The step whose save is cut off: between the ends of two rounds."""


def saving(folder: Path, model: Path) -> RealTrainer:
    """A site that saves each of its four steps, and keeps one checkpoint; rounds end with steps 2 and 4."""
    uri = announced(folder / "bucket", inner_steps=2)
    trainer = real_site(folder, "a", model, uri, ckpt={"interval": 1, "keep_last": 1})
    feed(trainer)
    return trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RealTrainer:
    """One that nothing disturbed."""
    trainer = saving(tmp_path_factory.mktemp("calm"), model).start()
    trainer.finish()
    return trainer


@stages
def test_a_real_trainer_killed_while_it_saves_resumes_and_loses_nothing_merged(
    stage: Stage, calm: RealTrainer, model: Path, tmp_path: Path
) -> None:
    trainer = saving(tmp_path, model)
    checkpoints = trainer.folder / "checkpoints"
    orchestrator_has_shipped(checkpoints, STEP)
    trainer.within = stage.within(STEP, STEP - 1)
    assert trainer.start().wait()[0] == -9
    trainer.within = ()
    resumed = STEP if stage.is_whole else STEP - 1
    assert newest(checkpoints) == resumed
    if not stage.is_whole:  # PRIME-RL's own choice is the newest folder
        check_refused(trainer.start(resume=-1), STEP, resumed)
    trainer.start(resume=-1 if stage.is_whole else resumed).finish()
    assert [one["version"] for one in trainer.masters()] == [3]
    if trainer.fed:  # otherwise batches depend on when the process began
        assert trainer.masters() == calm.masters()
        assert_same(trainer.checkpoint(4), calm.checkpoint(4))
