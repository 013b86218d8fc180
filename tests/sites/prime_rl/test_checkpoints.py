"""A stand-in trainer killed at every stage of a save: it resumes, and what rounds had merged stays merged."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_prime.sites.prime_rl.settings import OUTER, SITE
from composer_prime.store import keys, open_store
from composer_prime.sync.records import Commit
from tests.sites.prime_rl.comparing import assert_same
from tests.sites.prime_rl.killed import STAGES, Stage, check_refused, newest, orchestrator_has_shipped
from tests.sites.prime_rl.launched import announced
from tests.sites.prime_rl.standin_runs import Trainer, site

pytestmark = pytest.mark.slow


def after_the_first_round(trainer: Trainer) -> str:
    """The master that the run's first round made, as the second round's commit names it."""
    store = open_store(trainer.env["COMPOSER_PRIME_OUTER"])
    first, second = (Commit.model_validate_json(store.get(keys.commit(0, version))) for version in (0, 1))
    assert first.taken and second.taken and second.base_sha != first.base_sha
    return second.base_sha


def at_the_end(trainer: Trainer) -> list[dict[str, Any]]:
    return json.loads((trainer.folder / "outer" / "result.json").read_text())["masters"]


def saving(folder: Path) -> Trainer:
    """A site that saves every other of its eight steps, and keeps one checkpoint; rounds end with steps 4 and 8."""
    return site(folder, "a", announced(folder / "bucket"), ckpt_interval=2, keep_last=1)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """One that nothing disturbed."""
    trainer = saving(tmp_path_factory.mktemp("calm")).start()
    trainer.finish()
    return trainer


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("step", [4, 6])
def test_a_trainer_killed_while_it_saves_resumes_and_loses_nothing_merged(
    step: int, stage: Stage, calm: Trainer, tmp_path: Path
) -> None:
    trainer = saving(tmp_path)
    checkpoints = trainer.folder / "checkpoints"
    trainer.within = stage.within(step, step - 2)
    assert trainer.start().wait()[0] == -9
    orchestrator_has_shipped(checkpoints, step)
    trainer.within = ()
    resumed = step if stage.is_whole else step - 2
    assert newest(checkpoints) == resumed
    if not stage.is_whole:  # PRIME-RL's own choice is the newest folder
        check_refused(trainer.start(resume=-1), step, resumed)
    trainer.start(resume=-1 if stage.is_whole else resumed).finish()
    assert after_the_first_round(trainer) == after_the_first_round(calm)
    if resumed >= 4:  # where it ended: all is as if nobody had been killed
        assert_same(trainer.broadcast(8), calm.broadcast(8))
        assert at_the_end(trainer) == at_the_end(calm)
    assert [one["version"] for one in at_the_end(trainer)] == [3]


def test_a_step_is_resumed_from_only_with_all_that_it_had(tmp_path: Path) -> None:
    trainer = saving(tmp_path)
    checkpoints = trainer.folder / "checkpoints"
    trainer.within = STAGES["an old one half deleted"].within(8, 6)
    assert trainer.start().wait()[0] == -9
    orchestrator_has_shipped(checkpoints, 6)
    assert (checkpoints / "step_6" / "trainer" / ".metadata").is_file() and newest(checkpoints) is None
    trainer.within = ()
    check_refused(trainer.start(resume=6), 6, 8)
    orchestrator_has_shipped(checkpoints, 8)
    assert newest(checkpoints) == 8


def test_a_checkpoint_is_the_past_of_its_own_site_alone(tmp_path: Path) -> None:
    trainer = saving(tmp_path)
    assert trainer.start(die_at_step=6).wait()[0] == -9
    trainer.env[SITE] = "b"
    code, output = trainer.start(resume=6).wait()
    (said,) = [line for line in output.splitlines() if line.startswith("composer-prime: ")]
    assert code == 2 and "is of site a and this is site b" in said and "Traceback" not in output
    trainer.env[SITE] = "a"
    trainer.start(resume=6).finish()


def test_from_another_folders_checkpoint_a_site_joins_anew_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    first = saving(tmp_path / "first")
    assert first.start(die_at_step=6).wait()[0] == -9
    checkpoints = first.folder / "checkpoints"
    state = (checkpoints / "outer" / "step_6.pt").read_bytes()
    beside = site(tmp_path / "beside", "b", first.env[OUTER])
    forked = site(tmp_path / "forked", "a", announced(tmp_path / "fork"))
    for trainer in (beside, forked):
        _, output = trainer.start(resume=6, resume_dir=str(checkpoints), die_at_step=7).wait()
        assert "anothers_state" in output and "joined uri=" in output
    # What the first site trained since the run's round isn't the other's to offer: it starts from the round's master.
    assert_same(beside.broadcast(6), first.broadcast(4))
    assert_same(forked.broadcast(6), first.broadcast(6))
    assert (checkpoints / "outer" / "step_6.pt").read_bytes() == state


def test_a_flipped_bit_in_the_outer_state_is_named_and_the_step_before_is_resumed_from(tmp_path: Path) -> None:
    trainer = site(tmp_path, "a", announced(tmp_path / "bucket"), ckpt_interval=2, keep_last=2)
    checkpoints = trainer.folder / "checkpoints"
    assert trainer.start(die_at_step=7).wait()[0] == -9
    orchestrator_has_shipped(checkpoints, 4)
    orchestrator_has_shipped(checkpoints, 6)
    state = checkpoints / "outer" / "step_6.pt"
    assert newest(checkpoints) == 6
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    assert newest(checkpoints) == 4
    check_refused(trainer.start(resume=6), 6, 4)
    trainer.start(resume=4).finish()
