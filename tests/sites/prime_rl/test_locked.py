"""Our loss beside nothing but what PRIME-RL's own lock brings, and what an outer run says of a package that it lacks.

`locked/` holds, for each version, the names in its uv.lock that `uv sync` installs on Linux without extras or groups:
what the package prime-rl reaches by `dependencies`, sorted.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_prime.sync.signatures import SigningKey
from tests.sites.prime_rl.launched import HOOKED, REPOSITORY, Launched, Process, announced
from tests.sites.prime_rl.standin_runs import Trainer, site

pytestmark = pytest.mark.slow

ADDED = ("obstore", "zstandard")
LOCKS = sorted(Path(__file__).with_name("locked").glob("*.txt"))


class LockedTrainer(Trainer):
    """A stand-in whose only rank can import what a list names: a process of its own, forked from none of ours."""

    def _start(self, module: str, arguments: list[str], environment: dict[str, str], log: Path) -> Process:
        return Launched._start(self, module, arguments, environment, log)


def beside(names: Path, trainer: Trainer) -> LockedTrainer:
    within = "tests.sites.prime_rl.only_locked", str(names)
    return LockedTrainer(trainer.folder, env=trainer.env, within=within, config=trainer.config | {"max_steps": 1})


@pytest.mark.parametrize("names", LOCKS, ids=lambda path: path.stem)
def test_the_loss_needs_nothing_that_upstreams_lock_lacks(names: Path, tmp_path: Path) -> None:
    beside(names, Trainer(tmp_path / "plain", config={"loss": {"import_path": HOOKED}})).start().finish()


@pytest.mark.parametrize(
    ("uri", "keyed", "missing"),
    [("", False, "zstandard"), ("s3://bucket/run", False, "obstore"), ("", True, "cryptography")],
)
def test_a_package_that_an_outer_run_lacks_is_one_line_with_the_command(
    uri: str, keyed: bool, missing: str, tmp_path: Path
) -> None:
    there = {*LOCKS[0].read_text().split(), *ADDED}
    names = tmp_path / "names"
    names.write_text("\n".join(there - {missing}))
    trainer = site(tmp_path, "a", uri or announced(tmp_path / "bucket"))
    if keyed:
        SigningKey.generate().save(tmp_path / "key.pem")
        trainer.env["COMPOSER_PRIME_KEY"] = str(tmp_path / "key.pem")
    code, output = beside(names, trainer).start().wait()
    assert code == 2, output
    said = f"needs {missing}, which isn't installed beside PRIME-RL: uv pip install {missing}"
    assert [said in line for line in output.splitlines() if line.startswith("composer-prime: ")] == [True], output
    assert "Traceback" not in output and not (tmp_path / "a" / "broadcasts").exists()


@pytest.mark.parametrize("names", LOCKS, ids=lambda path: path.stem)
def test_beside_what_the_docs_command_adds_an_outer_run_works_on_s3(
    names: Path, store_uri: Callable[[str], str], tmp_path: Path
) -> None:
    there = tmp_path / "names"
    there.write_text("\n".join([*names.read_text().split(), *ADDED]))
    trainer = site(tmp_path, "a", announced(store_uri("moto"), inner_steps=1, rounds=1))
    beside(there, trainer).start().finish()
    ended = json.loads((trainer.folder / "outer" / "result.json").read_text())
    assert [one["version"] for one in ended["masters"]] == [2]


@pytest.mark.parametrize("page", ["README.md", "docs/prime-rl.md"])
def test_the_docs_name_the_command_that_the_tests_try(page: str) -> None:
    assert f"uv pip install --no-deps {' '.join(ADDED)} /path/to/composer-prime" in (REPOSITORY / page).read_text()
