"""Where a trainer is told its outer run: never silently alone, whoever starts it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import ConfigError
from composer_prime.sites.prime_rl import outer, versions
from composer_prime.sites.prime_rl.settings import KEY, OUTER, SITE, HookSettings
from tests.patience import PATIENCE_S
from tests.sites.prime_rl.launched import REPOSITORY, announced, outer_env
from tests.sites.prime_rl.standin_runs import STANDIN, Trainer
from tests.sites.prime_rl.test_any_loss import WRAPPED, custom
from tests.sites.prime_rl.test_contract import TRAIN, changed

HERE = {OUTER: "s3://bucket/run", SITE: "a"}
KWARGS = {"outer": "s3://bucket/run", "site": "a"}


@pytest.mark.parametrize(
    ("environ", "env_vars", "kwargs"),
    [
        (HERE, {}, {}),
        ({}, HERE, {}),
        ({}, {}, KWARGS),
        (HERE, HERE, KWARGS),
        ({OUTER: HERE[OUTER]}, {SITE: " a "}, {"site": "a", "inner": "ipo"}),
    ],
)
def test_a_run_is_found_wherever_it_is_said(
    environ: dict[str, str], env_vars: dict[str, str], kwargs: dict[str, Any]
) -> None:
    assert HookSettings.read(environ, env_vars, kwargs) == HookSettings("s3://bucket/run", "a", None)


@pytest.mark.parametrize(
    ("environ", "env_vars", "kwargs", "said"),
    [
        (HERE, HERE | {SITE: "b"}, {}, "COMPOSER_PRIME_SITE in the environment is a and trainer.env_vars.COMPOSER_PRI"),
        (HERE, {}, {"outer": "s3://other/run"}, "is s3://bucket/run and trainer.loss.kwargs.outer is s3://other/run"),
        ({}, HERE, {"site": "b"}, "trainer.env_vars.COMPOSER_PRIME_SITE is a and trainer.loss.kwargs.site is b"),
        ({OUTER: ""}, {}, {}, "COMPOSER_PRIME_OUTER in the environment is there and names no bucket"),
        ({}, {OUTER: " "}, {}, "trainer.env_vars.COMPOSER_PRIME_OUTER is there and names no bucket"),
        ({}, {}, {"outer": ""}, "trainer.loss.kwargs.outer is there and names no bucket"),
        ({}, {}, {"outer": 5}, "trainer.loss.kwargs.outer (5) must be text"),
        ({}, {}, {"site": "a"}, "COMPOSER_PRIME_SITE is set (a) and COMPOSER_PRIME_OUTER isn't"),
        (
            {OUTER: HERE[OUTER]},
            {},
            {},
            "COMPOSER_PRIME_SITE, or trainer.loss.kwargs.site, must be set where an outer",
        ),
        ({}, {KEY: "k"}, {}, "COMPOSER_PRIME_KEY is set (k) and COMPOSER_PRIME_OUTER isn't"),
    ],
)
def test_contradictions_and_halves_are_refused(
    environ: dict[str, str], env_vars: dict[str, str], kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        HookSettings.read(environ, env_vars, kwargs)
    assert said in str(refused.value)


def test_a_step_of_nobodys_and_a_run_outside_a_trainer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "is_loaded", lambda: False)
    with pytest.raises(ConfigError, match=r"on_step\(print\) was called outside PRIME-RL's trainer"):
        outer.on_step(print)
    with pytest.raises(ConfigError, match="the outer run s3://bucket/run is named, and no PRIME-RL's"):
        outer.loss(object(), **KWARGS)  # type: ignore[arg-type]


def test_without_a_run_nothing_that_a_bucket_needs_is_imported() -> None:
    program = (
        "import sys, composer_prime.sites.prime_rl.outer\n"
        "rooms = {'.'.join(name.split('.')[:2]) for name in sys.modules if name.startswith('composer_prime.')}\n"
        "print(sorted(rooms), 'zstandard' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    rooms = [f"composer_prime.{room}" for room in ("errors", "losses", "redaction", "sites", "visible", "waiting")]
    assert done.stdout == f"{rooms} False\n"


def started(folder: Path, env: dict[str, str], **config: Any) -> Trainer:
    return Trainer(folder / "site-a", 1, env, config=config).start()


@pytest.mark.slow
def test_without_any_launcher_a_trainer_joins_by_its_configuration_alone(tmp_path: Path) -> None:
    uris = [announced(tmp_path / name) for name in ("first", "second")]
    by_config = started(tmp_path / "1", {}, env_vars=outer_env(uris[0], "a"))
    by_loss = started(tmp_path / "2", {}, loss=custom(WRAPPED, outer=uris[1], site="b", inner="ipo"))
    assert f"joined uri={uris[0]} site=a" in by_config.finish()
    assert f"joined uri={uris[1]} site=b" in by_loss.finish()


@pytest.mark.slow
def test_under_torchrun_itself_two_ranks_join_or_end_in_one_line(tmp_path: Path) -> None:
    uri = announced(tmp_path / "bucket")

    def torchrun(**config: Any) -> subprocess.CompletedProcess[str]:
        whole = repr(Trainer(tmp_path / "a", config=config).resolved())
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSER_PRIME_")}
        env |= {"PYTHONPATH": f"{STANDIN}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
        command = [*launcher, "-m", "prime_rl.trainer.rl.train", whole]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)

    refused = torchrun(env_vars=outer_env(uri, "a"), loss=custom(WRAPPED, outer="/elsewhere"))
    assert refused.returncode != 0
    assert [line for line in refused.stderr.splitlines() if line.startswith("composer-prime: ")] == [
        f"composer-prime: trainer.env_vars.COMPOSER_PRIME_OUTER is {uri} and trainer.loss.kwargs.outer is /elsewhere: "
        "say COMPOSER_PRIME_OUTER in one place, or the same in both"
    ]
    joined = torchrun(env_vars=outer_env(uri, "a"))
    assert joined.returncode == 0 and f"joined uri={uri} site=a" in joined.stderr, joined.stderr


@pytest.mark.slow
def test_a_trainer_that_comes_to_its_first_step_alone_ends(tmp_path: Path) -> None:
    early = changed(
        tmp_path / "early", TRAIN, "import os\n", "import os\n\nimport composer_prime.sites.prime_rl.outer\n"
    )
    assert (STANDIN / "prime_rl" / TRAIN).read_text().count("import os\n") == 1
    uri = announced(tmp_path / "bucket")
    told = [{"env_vars": outer_env(uri, "a")}, {"loss": custom(WRAPPED, outer=uri, site="a")}]
    for number, config in enumerate(told):
        trainer = Trainer(tmp_path / f"{number}", 1, {}, config=config, path=(early,))
        code, output = trainer.start().wait()
        assert code == 2 and f"the outer run {uri} and hasn't joined it before its first step" in output
        assert not (trainer.folder / "broadcasts" / "step_1.safetensors").exists()
