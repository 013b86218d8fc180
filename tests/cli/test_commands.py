"""What each command makes of its arguments, and how a mistake is answered: one line, exit code 2, no traceback."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from composer_prime.config import PrimeRecipe, Recipe
from composer_prime.errors import ProcessCrashed, StoreUnusable
from tests.architecture import REPOSITORY
from tests.cli.command_line import Answer, assert_refused

RECIPE = str(REPOSITORY / "recipes/local/two_sites.toml")
STARTER = "composer_prime.sites.embedded.local_run"


class FakeStarter(ModuleType):
    """Stands for the room that starts sites: remembers what it was asked to start, and ends as it was told to."""

    def __init__(self) -> None:
        super().__init__(STARTER)
        self.asked: list[tuple[Recipe, str | None, bool]] = []
        self.end: int | Exception = 0

    def run_local(self, recipe: Recipe, resume: bool) -> int:
        return self._start(recipe, None, resume)

    def run_site(self, recipe: Recipe, site: str, resume: bool) -> int:
        return self._start(recipe, site, resume)

    def _start(self, recipe: Recipe, site: str | None, resume: bool) -> int:
        self.asked.append((recipe, site, resume))
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch) -> FakeStarter:
    fake = FakeStarter()
    monkeypatch.setitem(sys.modules, STARTER, fake)
    return fake


def test_run_starts_the_recipe_with_its_overrides(cli, starter: FakeStarter) -> None:
    assert cli("run", RECIPE, "--clean", "--outer.lr", "0.5", "--run.seed=1", "--resume").code == 0
    ((recipe, site, resume),) = starter.asked
    assert (recipe.clean, recipe.outer and recipe.outer.lr, recipe.run.seed) == (True, 0.5, 1)
    assert (site, resume) == (None, True)


def test_run_takes_composed_files(cli, starter: FakeStarter, tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text("max_steps = 48\n")
    assert cli("run", RECIPE, "@", str(tmp_path / "more.toml")).code == 0
    assert cli("run", "@", RECIPE, f"@{tmp_path / 'more.toml'}").code == 0
    assert [recipe.max_steps for recipe, _, _ in starter.asked] == [48, 48]


def test_run_ends_with_the_code_of_the_run(cli, starter: FakeStarter) -> None:
    starter.end = 130
    assert cli("run", RECIPE).code == 130


def test_site_starts_the_named_site_and_leaves_the_recipe_as_it_is(cli, starter: FakeStarter) -> None:
    assert cli("site", RECIPE, "--site", "c", "--sites.overrides.c.sampling_seed", "3").code == 0
    assert cli("site", RECIPE, "--site.name", "b").code == 0
    (joiner, name, resume), (_, default_name, _) = starter.asked
    assert (name, joiner.site.name, joiner.sites.overrides["c"].sampling_seed, resume) == ("c", "a", 3, False)
    assert default_name == "b"


@pytest.mark.parametrize("command", [["run"], ["site", "--name", "b"]], ids=" ".join)
@pytest.mark.parametrize("options", [[], ["--resume"], ["--dry-run"]], ids=str)
def test_prime_rl_recipes_go_to_their_own_room(
    cli, monkeypatch: pytest.MonkeyPatch, command: list[str], options: list[str]
) -> None:
    asked: list[tuple] = []
    room = ModuleType("composer_prime.sites.prime_rl.launch")
    room.run_local = lambda *given, **more: asked.append((*given, more)) or 7  # type: ignore[attr-defined]
    room.run_site = room.run_local  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, room.__name__, room)
    assert cli(*command, str(REPOSITORY / "recipes/cluster/reverse_text.toml"), *options).code == 7
    ((recipe, *site, resume, more),) = asked
    assert isinstance(recipe, PrimeRecipe) and site == command[2:]
    assert (resume, more) == ("--resume" in options, {"dry_run": "--dry-run" in options})


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["run", RECIPE, "--dry-run"], ["--dry-run checks a PRIME-RL configuration", "composer-prime plan"]),
        (["site", RECIPE, "--dry-run"], ["--dry-run checks a PRIME-RL configuration", "composer-prime plan"]),
        (["run", RECIPE, "--outer.inner_stepz", "4"], ["outer.inner_stepz", "did you mean outer.inner_steps?"]),
        (["run", RECIPE, "--outer.inner_steps", "9"], ["outer.inner_steps (9)", "multiple of outer.fragments (2)"]),
        (["site", RECIPE, "--outer.sync_delay", "6"], ["outer.sync_delay (6)", "smaller than", "lower the delay"]),
        (["run", "none.toml"], ["none.toml", "doesn't exist"]),
        (["run", "--clean", RECIPE], ["RECIPE must come before the settings"]),
        (["site", RECIPE, "--site", "C"], ["site", "'C'"]),
        (["plan", RECIPE, "--outer.fragments", "6", "--outer.sync_delay=0"], ["outer.fragments (6)", "blocks", "(4)"]),
        (["plan", RECIPE, "--model.name", str(REPOSITORY)], ["model.name", "no config.json"]),
    ],
)
def test_bad_input_is_answered_in_one_line(cli, starter: FakeStarter, arguments: list[str], parts: list[str]) -> None:
    assert_refused(cli(*arguments), *parts)
    assert starter.asked == []


def test_what_the_run_refuses_is_answered_in_one_line(cli, starter: FakeStarter) -> None:
    starter.end = StoreUnusable("store s3://nowhere can't be reached: check outer.store")
    assert_refused(cli("run", RECIPE), "s3://nowhere")


def test_a_failure_of_the_run_shows_its_log_and_ends_with_1(cli, starter: FakeStarter) -> None:
    starter.end = ProcessCrashed("trainer of site a ended with code 1; its log ends:\n  boom")
    answer = cli("run", RECIPE)
    assert answer.code == 1 and answer.err.endswith("boom\n") and "Traceback" not in answer.err


def test_the_console_script_answers_bad_input_without_a_traceback() -> None:
    command = [sys.executable, "-m", "composer_prime.cli.main", "run", RECIPE, "--max_step", "3"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert_refused(Answer(done.returncode, done.stdout, done.stderr), "max_step", "did you mean max_steps?")


def test_the_version_is_that_of_the_package(cli) -> None:
    assert cli("--version").out == f"composer-prime {importlib.metadata.version('composer-prime')}\n"
