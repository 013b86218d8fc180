"""Upstream's unmodified trainer killed at every stage of a save, as test_real_trainer.py runs it."""

import os

import pytest

from tests.sites.prime_rl.comparing import assert_same
from tests.sites.prime_rl.killed import STAGES, check_refused, newest, orchestrator_has_shipped
from tests.sites.prime_rl.launched import announced
from tests.sites.prime_rl.real_runs import RealTrainer, feed, real_site, save_model

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]

STEP = 3
"""The step whose save is cut off: between the ends of two rounds."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealTrainer]:
    """For each stage, and for none, a site that saves each of its four steps and keeps one; rounds end with 2 and 4."""
    model = save_model(tmp_path_factory.mktemp("model"))
    found = {}
    for name in ("calm", *STAGES):
        folder = tmp_path_factory.mktemp("site")
        uri = announced(folder / "bucket", inner_steps=2)
        found[name] = real_site(folder, "a", model, uri, ckpt={"interval": 1, "keep_last": 1})
    feed(*found.values())
    found["calm"].start().finish()
    return found


@pytest.mark.parametrize("name", STAGES)
def test_a_real_trainer_killed_while_it_saves_resumes_and_loses_nothing_merged(
    name: str, sites: dict[str, RealTrainer]
) -> None:
    stage, trainer, calm = STAGES[name], sites[name], sites["calm"]
    checkpoints = trainer.folder / "checkpoints"
    trainer.within = stage.within(STEP, STEP - 1)
    assert trainer.start().wait()[0] == -9
    orchestrator_has_shipped(checkpoints, STEP)
    trainer.within = ()
    resumed = STEP if stage.is_whole else STEP - 1
    assert newest(checkpoints) == resumed
    if name in ("before ours", "upstream's all but whole"):  # no file of upstream's trainer, and all but one
        check_refused(trainer.start(resume=-1), STEP, resumed)
    trainer.start(resume=-1 if stage.is_whole else resumed).finish()
    assert [one["version"] for one in trainer.masters()] == [3]
    if trainer.fed:  # otherwise batches depend on when the process began
        assert trainer.masters() == calm.masters()
        assert_same(trainer.checkpoint(4), calm.checkpoint(4))
