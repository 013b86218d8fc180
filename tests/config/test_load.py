"""How a recipe is read: files, composition, overrides, and what is said when something is wrong."""

from pathlib import Path

import pytest

from composer_prime.config import load_recipe, recipe_from_data
from composer_prime.config.load import parse_value
from composer_prime.config.messages import GONE
from composer_prime.errors import ConfigError
from tests.config.recipes import minimal

RECIPE = """
max_steps = 40
[run]
name = "test"
[[orchestrator.train.source]]
name = "letters"
[orchestrator.train.source.env.taskset]
id = "reverse-letters"
num_letters = 5
[outer]
inner_steps = 16
fragments = 2
"""


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def complaint(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_recipe(path, overrides)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_recipe_holds_what_its_file_says_and_defaults_elsewhere(recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path)
    assert (recipe.run.name, recipe.max_steps, recipe.run.seed) == ("test", 40, 0)
    assert recipe.outer is not None
    assert (recipe.outer.inner_steps, recipe.outer.codec) == (16, "int8")
    assert recipe.rounds == 2


def test_keys_a_taskset_has_of_its_own_reach_it(recipe_path: Path) -> None:
    taskset = (
        load_recipe(recipe_path, ["--orchestrator.train.source.0.env.taskset.hard", "true"])
        .orchestrator.train.source[0]
        .env.taskset
    )
    assert taskset.model_dump() == {"id": "reverse-letters", "num_letters": 5, "hard": True}


@pytest.mark.parametrize("override", [("--outer.lr", "0.5"), ("--outer.lr=0.5",)])
def test_an_override_wins_over_the_file(recipe_path: Path, override: tuple[str, ...]) -> None:
    outer = load_recipe(recipe_path, override).outer
    assert outer is not None and outer.lr == 0.5


def test_overrides_reach_names_in_tables_and_entries_in_lists(recipe_path: Path) -> None:
    recipe = load_recipe(
        recipe_path,
        ["--sites.overrides.a.sampling_seed", "3", "--orchestrator.train.source.0.name", "other", "--clean"],
    )
    assert recipe.sites.overrides["a"].sampling_seed == 3
    assert recipe.orchestrator.train.source[0].name == "other"
    assert recipe.clean is True


def test_the_last_of_two_overrides_wins(recipe_path: Path) -> None:
    assert load_recipe(recipe_path, ["--max_steps", "50", "--max_steps", "60"]).max_steps == 60


def test_later_files_win_table_by_table_and_overrides_win_over_all(recipe_path: Path, tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text("max_steps = 80\n[outer]\nlr = 0.25\ncodec = 'fp32'\n")
    (tmp_path / "outer.toml").write_text("codec = 'bf16'\n")
    recipe = load_recipe(
        recipe_path,
        ["--max_steps", "160", "@", str(tmp_path / "more.toml"), "--outer", "@", str(tmp_path / "outer.toml")],
    )
    assert recipe.outer is not None
    assert (recipe.max_steps, recipe.outer.lr, recipe.outer.codec, recipe.outer.inner_steps) == (160, 0.25, "bf16", 16)


def test_a_recipe_may_be_named_by_the_at_sign_alone(recipe_path: Path) -> None:
    assert load_recipe(None, ["@", str(recipe_path)]) == load_recipe(recipe_path)
    assert load_recipe(None, [f"@{recipe_path}"]) == load_recipe(recipe_path)


def test_the_word_none_clears_a_setting_or_a_table(recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path, ["--outer", "None", "--trainer.optim.max_norm", "None"])
    assert recipe.outer is None and recipe.trainer.optim.max_norm is None
    assert recipe.rounds == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("1e-3", 1e-3), ("true", True), ('"7"', "7"), ("[1, 2]", [1, 2]), ("int8", "int8"),
        ("s3://bucket/run", "s3://bucket/run"), ("2026-01-01", "2026-01-01"), ("1\nrun = 2", "1\nrun = 2"), ("", ""),
    ],
)  # fmt: skip
def test_a_value_is_toml_where_it_parses_and_text_elsewhere(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--outer.inner_stepz 4", "outer.inner_stepz isn't a known key: did you mean outer.inner_steps?"),
        ("--trainer.optim.beta1 0.9", "trainer.optim.beta1 isn't a known key: did you mean trainer.optim.betas1?"),
        ("--kl_tau 0", "kl_tau isn't a known key: remove it, or use one that the recipe knows: run, max_steps, "),
        ("--sync_delay 1", "sync_delay isn't a known key: did you mean outer.sync_delay?"),
        ("--outer.temperature 1", "outer.temperature isn't a known key: did you mean orchestrator.train.sampling.temp"),
        ("--monitors.file.path x", "monitors.file isn't a known key: "),
        ("--monitors.wandb.id x", "monitors.wandb.id isn't a known key: "),
        ("--monitors.trackio.entity a", "monitors.trackio.entity isn't a known key: did you mean monitors.wandb.en"),
        ("--sites.overrides.a.seed 1", "sites.overrides.a.seed isn't a known key: did you mean run.seed?"),
        (
            "--orchestrator.train.source.0.env.agent.harnes.id x",
            "orchestrator.train.source[0].env.agent.harnes isn't a known key: did you mean "
            "orchestrator.train.source[0].env.agent.harness?",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_name_or_what_does_its_job(
    recipe_path: Path, override: str, message: str
) -> None:
    assert complaint(recipe_path, *override.split()).startswith(message)


def test_an_unknown_key_is_reported_before_what_it_left_undone(recipe_path: Path) -> None:
    data = minimal()
    data["max_step"] = data.pop("max_steps")
    with pytest.raises(ConfigError, match=r"^max_step isn't a known key: did you mean max_steps\? \(and 1 more\)$"):
        recipe_from_data(data)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "--outer.sync_delay 9",
            "outer.sync_delay (9) must be smaller than outer.inner_steps / outer.fragments (8): lower "
            "the delay or sync less often",
        ),
        (
            "--outer.sync_delay 8",
            "outer.sync_delay (8) must be smaller than outer.inner_steps / outer.fragments (8): lower "
            "the delay or sync less often",
        ),
        (
            "--outer.inner_steps 9",
            "outer.inner_steps (9) must be a multiple of outer.fragments (2): try 8, or other fragments",
        ),
        ("--max_steps 15", "max_steps (15) must be at least outer.inner_steps (16): train longer or sync more often"),
        (
            "--orchestrator.batch_size 60",
            "orchestrator.batch_size (60) must be a multiple of orchestrator.group_size (8): try 64",
        ),
        (
            "--seq_len 16",
            "orchestrator.train.sampling.max_completion_tokens (16) must be smaller than seq_len (16): "
            "lower it, or raise seq_len so that the prompt fits too",
        ),
        (
            "--trainer.scheduler.type linear --trainer.scheduler.decay_steps 31",
            "trainer.scheduler.warmup_steps (10) + decay_steps (31) must be between 1 and max_steps (40): change one "
            "of them",
        ),
        (
            "--trainer.scheduler.type linear --trainer.scheduler.min_lr 5",
            "trainer.scheduler.min_lr (5) must be at most trainer.optim.lr (1e-06): lower it",
        ),
        (
            "--trainer.scheduler.type cosine",
            "trainer.scheduler.type (cosine) must be 'constant' or 'linear': choose one of them",
        ),
        (
            "--trainer.scheduler.warmup_steps 3",
            'trainer.scheduler.warmup_steps (3) is for trainer.scheduler.type "linear", and it is "constant": leave it '
            "out, or set the type",
        ),
        (
            "--trainer.optim.mu 0.9",
            'trainer.optim.mu (0.9) is for trainer.optim.type "muon", and it is "adamw": leave it out, or set the type',
        ),
        ("--outer.lr -1", "outer.lr (-1) must be greater than 0: raise it"),
        ("--outer.momentum 1", "outer.momentum (1) must be less than 1: lower it"),
        ("--outer.lr nan", "outer.lr (NaN) must be a finite number: correct it"),
        (
            "--outer.codec int3",
            "outer.codec (int3) must be 'fp32', 'bf16', 'int8', 'int4' or 'topk': choose one of them",
        ),
        ("--max_steps many", "max_steps (many) must be a valid integer: correct it"),
        ("--max_steps", "max_steps (true) must be a valid integer: correct it"),
        ("--clean 1", "clean (1) must be a valid boolean: write true or false"),
        ("--run.name 7", "run.name (7) must be a valid string: put it in quotes"),
        (
            "--run.name a/b",
            "run.name ('a/b') must be 1 to 64 of a-z, 0-9, '.', '_' and '-', starting with a letter or "
            "digit: choose another name",
        ),
        (
            "--site.name A",
            "site name ('A') must be 1 to 32 of a-z, 0-9 and -, not starting with -: choose another name",
        ),
        (
            "--sites.overrides.A.data_shard 1",
            "site name ('A') must be 1 to 32 of a-z, 0-9 and -, not starting with -: choose another name",
        ),
        ("--outer 3", "outer (3) must be a table: write its keys below [its name]"),
        (
            "--orchestrator.train.source []",
            "orchestrator.train.source names no environment: add one, which hints and replay.teachers need, or stored "
            "sessions to learn from alone, in [replay.pairs]",
        ),
        (
            "--trainer.loss.import_path loss",
            "trainer.loss.import_path (loss) must be package.module.function: give the full name",
        ),
        ("--max_steps.x 3", "override (--max_steps.x) needs a table above 'x', but there stands 40: drop one"),
        (
            "--orchestrator.train.source.1.name x",
            "override (--orchestrator.train.source.1.name) needs an entry's number where it says '1', "
            "below 1: write `--list.0.key value`",
        ),
        ("--outer..lr 1", "override (--outer..lr) has an empty part: write `--table.key value`"),
        (
            "outer.lr 1",
            "override (outer.lr) must be `--key value` or `@ file.toml`: write the setting's name before its value",
        ),
        ("@", "@ must be followed by a TOML file: write `@ file.toml`"),
    ],
)
def test_a_bad_value_is_named_with_its_limit_and_a_remedy(recipe_path: Path, override: str, message: str) -> None:
    assert complaint(recipe_path, *override.split()) == message


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_is_refused_by_a_line_that_names_what_does_its_job_now(recipe_path: Path, key: str) -> None:
    assert complaint(recipe_path, f"--{key}", "1") == f"{key} is no key any more: {GONE[key]}"


def test_a_missing_setting_is_named() -> None:
    data = minimal()
    del data["max_steps"]
    with pytest.raises(ConfigError, match=r"^max_steps is missing: add it$"):
        recipe_from_data(data)


def test_two_sources_of_one_name_are_refused() -> None:
    data = minimal()
    data["orchestrator"]["train"]["source"] *= 2
    with pytest.raises(ConfigError, match="names must differ, but letters is given 2 times"):
        recipe_from_data(data)


def test_a_file_that_is_absent_or_no_toml_is_named(tmp_path: Path) -> None:
    assert "doesn't exist: check the path" in complaint(tmp_path / "none.toml")
    assert "can't be read" in complaint(tmp_path)
    (tmp_path / "bad.toml").write_text("max_steps = \n")
    assert "isn't TOML" in complaint(tmp_path / "bad.toml") and "line 1" in complaint(tmp_path / "bad.toml")
    for nested in ("a = " + "[" * 5000 + "]" * 5000, f"[a{'.a' * 5000}]"):
        (tmp_path / "deep.toml").write_text(nested)
        assert "isn't TOML" in complaint(tmp_path / "deep.toml")
