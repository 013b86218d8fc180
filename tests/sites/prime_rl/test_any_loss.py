"""Any loss in a stand-in trainer: as itself without an outer run, as a site's with one; and what is no loss."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sites.prime_rl.comparing import assert_same
from tests.sites.prime_rl.launched import OWN, WRAPPED, announced, outer_env
from tests.sites.prime_rl.standin_runs import Trainer, site

pytestmark = pytest.mark.slow


def custom(path: str, **kwargs: Any) -> dict[str, Any]:
    return {"type": "custom", "import_path": path, "kwargs": kwargs}


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        name: ({"type": name, "adv_tau": 0.7}, custom(WRAPPED, inner=name, adv_tau=0.7))
        for name in ("ipo", "icepop", "ppo", "cispo")
    },
    "centred": ({"type": "ipo", "score_centering": True}, custom(WRAPPED, inner="ipo", score_centering=True)),
    "mine": (custom(f"{OWN}.my_loss", strength=0.7), custom(WRAPPED, inner=f"{OWN}.my_loss", strength=0.7)),
    "ours": (
        custom("composer_prime.losses.composer.composer_loss", replay_tau=0.5),
        custom(WRAPPED, replay_tau=0.5),
    ),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_without_an_outer_run_the_wrapped_loss_trains_as_itself(
    pair: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    plain, wrapped = (Trainer(tmp_path / name, config={"loss": loss}) for name, loss in zip("pw", pair, strict=True))
    plain.start()
    wrapped.start()
    plain.finish()
    assert wrapped.finish().count("no_outer_run: this trainer trains alone") == 1
    for step in (1, 4, 8):
        assert_same(plain.broadcast(step), wrapped.broadcast(step))


@pytest.mark.parametrize(
    "settings", [{"inner": "ipo"}, {"inner": f"{OWN}.my_loss"}, {"inner": "cispo", "replay_tau": 0.5}], ids=str
)
def test_two_sites_with_a_loss_that_isnt_ours_end_with_the_same_masters(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    uri = announced(tmp_path / "bucket", quorum=2)
    sites = [site(tmp_path, name, uri, loss=custom(WRAPPED, **settings)).start() for name in "ab"]
    for one in sites:
        assert "joined" in one.finish()
    first, second = sites
    for step in (0, 4, 8):
        assert_same(first.broadcast(step), second.broadcast(step))
    with pytest.raises(AssertionError):
        assert_same(first.broadcast(3), second.broadcast(3))


WRONG = {
    "no such built-in": ({"inner": "default"}, "one of this PRIME-RL's losses: cispo, icepop, ipo, ppo"),
    "a setting it hasn't": ({"inner": "ipo", "kl_tau": 0.1}, "trainer.loss.kwargs.kl_tau doesn't fit PRIME-RL's ipo"),
    "no such module": ({"inner": "nowhere.my_loss"}, "ModuleNotFoundError: No module named 'nowhere'"),
    "no such function": ({"inner": f"{OWN}.nothing"}, "AttributeError: module"),
    "what its import needs": ({"inner": "broken_loss.my_loss"}, "ModuleNotFoundError: No module named 'not_installed'"),
    "no function": ({"inner": f"{OWN}.NO_FUNCTION"}, "is a float"),
    "a setting of mine it hasn't": ({"inner": f"{OWN}.my_loss", "speed": 1}, "don't fit"),
    "another record": ({"inner": f"{OWN}.another_record"}, "returned SimpleNamespace: it must return PRIME-RL's"),
    "no sum": ({"inner": f"{OWN}.per_token"}, "the 0-dim sum over tokens"),
    "inputs of another version": ({"inner": f"{OWN}.of_another_version"}, "reads value_estimates of its inputs"),
    "itself": ({"inner": WRAPPED}, "can't be the loss that wraps it"),
    "no text": ({"inner": 5}, "trainer.loss.kwargs.inner (5) must be text"),
    "a setting of ours it hasn't": ({"eps": 0.1}, "use ipo_threshold with trust_region"),
    "a word for a number": ({"inner": "ipo", "replay_tau": "much"}, "must be numbers"),
    "below nothing": ({"inner": "ipo", "replay_tau": -1.0}, "the least that composer_loss takes is 0"),
}


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "a site"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_a_loss_that_cant_be_had_ends_the_trainer_in_one_line(
    wrong: tuple[dict[str, Any], str], alone: bool, tmp_path: Path
) -> None:
    settings, named = wrong
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "broken_loss.py").write_text("import not_installed\n")
    env = {} if alone else outer_env(announced(tmp_path / "bucket"), "a")
    trainer = Trainer(tmp_path / "a", 1, env, config={"loss": custom(WRAPPED, **settings)}, path=(tmp_path / "path",))
    code, output = trainer.start().wait()
    (said,) = [line for line in output.splitlines() if line.startswith("composer-prime: ")]
    assert code == 2 and named in said and "Traceback" not in output
    assert not (trainer.folder / "broadcasts" / "step_1.safetensors").exists()


def test_a_loss_that_only_later_reads_what_isnt_there_ends_the_trainer_in_one_line_too(tmp_path: Path) -> None:
    loss = custom(WRAPPED, inner=f"{OWN}.of_another_version_later")
    code, output = Trainer(tmp_path / "a", config={"loss": loss}).start().wait()
    (said,) = [line for line in output.splitlines() if line.startswith("composer-prime: ")]
    assert code == 2 and "reads value_estimates of its inputs" in said and "Traceback" not in output


def test_replay_is_refused_where_no_teacher_can_be_heard(tmp_path: Path) -> None:
    from tests.sites.prime_rl.test_contract import LOSS, TRAIN, changed

    deaf = changed(tmp_path / "changed", LOSS, "    ref_logprobs: Tensor | None\n", "")
    trains = deaf / "prime_rl" / TRAIN
    trains.write_text(trains.read_text().replace('"inference_logprobs", "ref_logprobs", ', '"inference_logprobs", '))
    loss = custom(WRAPPED, inner="ipo", replay_tau=0.1)
    code, output = Trainer(tmp_path / "a", config={"loss": loss}, path=(deaf,)).start().wait()
    assert code == 2 and "replay_tau (0.1) needs teachers' numbers" in output
    loss["kwargs"]["replay_tau"] = 0.0
    Trainer(tmp_path / "b", config={"loss": loss}, path=(deaf,)).start().finish()


# --- on_step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [custom(f"{OWN}.my_loss"), custom(WRAPPED, inner=f"{OWN}.my_loss")], ids=["own", "in"])
def test_a_function_of_ones_own_is_called_after_each_step_on_every_rank(loss: dict[str, Any], tmp_path: Path) -> None:
    env = {"ON_STEP_FILE": str(tmp_path / "steps")}
    Trainer(tmp_path / "a", 2, env, config={"loss": loss, "max_steps": 3}).start().finish()
    ranks = [[json.loads(line) for line in (tmp_path / f"steps.{rank}").read_text().splitlines()] for rank in (0, 1)]
    assert [[record[:2] for record in rank] for rank in ranks] == [[[1, False], [2, False], [3, True]]] * 2
    assert all(record[2] > 0 and record[3] == 2 and "embed.weight" in record[4] for rank in ranks for record in rank)
    logged = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in logged] == [1, 2, 3] and all("mine/norm" in record for record in logged)


def test_it_stands_beside_the_outer_loop_and_sees_the_rounds_weights(tmp_path: Path) -> None:
    uri = announced(tmp_path / "bucket", quorum=2)
    env = {"ON_STEP_FILE": str(tmp_path / "steps")}
    sites = [site(tmp_path, name, uri, loss=custom(WRAPPED, inner=f"{OWN}.my_loss")) for name in "ab"]
    for one in sites:
        one.env |= env | {"ON_STEP_FILE": f"{env['ON_STEP_FILE']}-{one.folder.name}"}
        one.start()
    for one in sites:
        one.finish()
    norms = []
    for one in sites:
        records = [json.loads(line) for line in (one.folder / "metrics.jsonl").read_text().splitlines()]
        norms.append({record["step"]: record["mine/norm"] for record in records if "mine/norm" in record})
        assert [record["step"] for record in records if "outer/round" in record] == [*range(1, 9)]
    assert norms[0][4] == norms[1][4] and norms[0][3] != norms[1][3]
