"""Upstream's unmodified trainer as a site: run with PRIME_RL_SRC=<checkout> and `-m prime_rl`; `make test-prime-rl`.

Commit 559b447 is fed by upstream's own rollout sender; older versions pack in the trainer and run on its fake data.
"""

import os
from pathlib import Path

import pytest

from composer_prime.sites.prime_rl import versions
from tests.sites.prime_rl.comparing import assert_same, differs
from tests.sites.prime_rl.launched import HOOKED, PLAIN, announced
from tests.sites.prime_rl.real_runs import RealTrainer, exported, feed, real_site, save_model, upstream

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]

ANY_LOSS = "composer_prime.sites.prime_rl.outer.loss"
needs_fed = "PRIME-RL before 559b447 packs rollouts in its trainer; only 559b447 is fed"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)], ids=str)
def test_two_real_sites_hold_the_same_masters_and_broadcast_the_same(
    ranks: tuple[int, int], model: Path, tmp_path: Path
) -> None:
    uri = announced(tmp_path / "bucket", inner_steps=2, quorum=2, liveness_s=60.0)
    sites = [real_site(tmp_path, name, model, uri, count) for name, count in zip("ab", ranks, strict=True)]
    feed(*sites)
    for one in sites:
        one.start()
    outputs = [one.finish() for one in sites]
    assert all("RL trainer finished!" in output and "joined uri=" in output for output in outputs)
    first, second = sites
    assert first.masters() == second.masters()
    assert [one["version"] for one in first.masters()] == [3]
    assert_same(first.checkpoint(2), second.checkpoint(2))
    assert_same(first.checkpoint(4), second.checkpoint(4))
    assert differs(first.checkpoint(2), first.checkpoint(4))
    if first.fed:
        for step in (0, 2, 4):
            assert_same(first.broadcast(step), second.broadcast(step))
        assert differs(first.broadcast(3), second.broadcast(3))
        assert_same(first.broadcast(4), exported(uri, model, tmp_path / "export"))


def test_a_killed_real_trainer_resumes_and_loses_no_round(model: Path, tmp_path: Path) -> None:
    if upstream() is not versions.MAIN:
        pytest.skip(needs_fed)
    calm_uri, uri = (announced(tmp_path / bucket, inner_steps=2) for bucket in ("calm", "rough"))
    calm = real_site(tmp_path / "undisturbed", "a", model, calm_uri)
    rough = real_site(tmp_path / "killed", "a", model, uri)
    feed(calm)
    feed(rough, last=3)
    calm.start().finish()
    rough.start().wait_for("broadcasts/step_3/STABLE")
    assert (rough.folder / "checkpoints" / "outer" / "step_2.pt").is_file()
    rough.kill()
    feed(rough, first=4)
    rough.start(resume=2).finish()
    assert rough.masters() == calm.masters()
    assert_same(rough.checkpoint(4), calm.checkpoint(4))
    assert_same(rough.broadcast(4), calm.broadcast(4))


def test_a_real_trainer_resumes_from_upstreams_checkpoint(model: Path, tmp_path: Path) -> None:
    uri = announced(tmp_path / "bucket", inner_steps=2, rounds=3)
    trainer = real_site(tmp_path, "a", model, uri)
    feed(trainer, last=6)
    assert "max_steps is reached" in trainer.start().finish()
    trainer.start(resume=4, max_steps=6).finish()
    assert [one["version"] for one in trainer.masters()] == [4]


def test_a_late_real_trainer_starts_from_the_masters(model: Path, tmp_path: Path) -> None:
    uri = announced(tmp_path / "bucket", inner_steps=2, rounds=3)
    first, late = real_site(tmp_path, "a", model, uri), real_site(tmp_path, "c", model, uri)
    feed(first, late)
    first.start().finish()
    output = late.start().finish()
    assert "run_ended" in output
    assert [one["version"] for one in late.masters()] == [4]
    if late.fed:
        assert_same(late.broadcast(0), first.broadcast(4))
    assert_same(late.checkpoint(2), late.checkpoint(4))


def test_without_an_outer_run_the_real_trainer_is_stock(model: Path, tmp_path: Path) -> None:
    def trainer(name: str, path: str) -> RealTrainer:
        return real_site(tmp_path, name, model, None, loss={"type": "custom", "import_path": path, "kwargs": {}})

    stock, hooked = trainer("stock", PLAIN), trainer("hooked", HOOKED)
    feed(stock, hooked)
    for one in (stock, hooked):
        one.start()
    for one in (stock, hooked):
        one.finish()
    for step in (2, 4):
        assert_same(stock.checkpoint(step), hooked.checkpoint(step))
    if stock.fed:
        assert_same(stock.broadcast(4), hooked.broadcast(4))
    assert not (hooked.folder / "outer").exists()


def test_two_real_sites_with_upstreams_own_loss_hold_the_same_masters(model: Path, tmp_path: Path) -> None:
    uri = announced(tmp_path / "bucket", inner_steps=2, quorum=2, liveness_s=60.0)
    settings = {"inner": "ipo", "ipo_threshold": 0.05, "outer": uri}
    sites = [
        real_site(
            tmp_path,
            name,
            model,
            None,
            loss={"type": "custom", "import_path": ANY_LOSS, "kwargs": settings},
            env_vars={"COMPOSER_PRIME_SITE": name},
        )
        for name in "ab"
    ]
    feed(*sites)
    for number, one in enumerate(sites):
        assert not one.env  # as under torchrun, all is said in the configuration
        one.config["data"] = {"fake": None if one.fed else {"batch_size": 2 + 2 * number}}
        one.start()
    for one in sites:
        assert "joined uri=" in one.finish()
    first, second = sites
    assert first.masters() == second.masters() and [one["version"] for one in first.masters()] == [3]
    for step in (2, 4):
        assert_same(first.checkpoint(step), second.checkpoint(step))


def test_without_an_outer_run_upstreams_own_loss_trains_as_itself(model: Path, tmp_path: Path) -> None:
    settings = {"ipo_threshold": 0.05, "adv_tau": 0.7}
    wrapped = {"type": "custom", "import_path": ANY_LOSS, "kwargs": {"inner": "ipo", **settings}}
    trainers = [
        real_site(tmp_path, name, model, None, loss=loss, ckpt={"interval": 2})
        for name, loss in (("stock", {"type": "ipo", **settings}), ("wrapped", wrapped))
    ]
    feed(*trainers)
    for one in trainers:
        one.start()
    outputs = [one.finish() for one in trainers]
    assert ["no_outer_run" in output for output in outputs] == [False, True]
    for step in (2, 4):
        assert_same(*(one.checkpoint(step) for one in trainers))


def test_the_checkouts_version_is_one_that_was_tested() -> None:
    assert upstream().name.removeprefix("v") in versions.TESTED
