"""A recipe whose sites are PRIME-RLs: what passes through, what is refused, and how that is said."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config import PrimeRecipe, Recipe, any_from_data, load_any
from composer_prime.config.prime_rl import LOSS_PATHS, OWNED, PORTS, UPSTREAM_TABLES
from composer_prime.config.toml import to_toml
from composer_prime.errors import ConfigError
from tests.sites.prime_rl.recipes import minimal, prime_recipe


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def complaint(**tables: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        any_from_data(minimal(**tables))
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_the_backend_decides_what_kind_of_recipe_it_is(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(minimal()))
    assert isinstance(load_any(path), PrimeRecipe)
    local = Path(__file__).parents[2] / "recipes/local/two_sites.toml"
    assert isinstance(load_any(local), Recipe)


def test_prime_rls_own_settings_are_kept_as_they_stand() -> None:
    trainer = {
        "model": {"cp": 2, "ac": {"freq": 1}},
        "scheduler": {"type": "cosine", "new_key": [1, 2.5, "x"]},
    }
    recipe = prime_recipe(trainer=trainer, ckpt={}, model={"name": "m", "vlm": {"freeze_vision_encoder": True}})
    assert recipe.upstream["trainer"] == trainer
    assert recipe.upstream["ckpt"] == {}
    assert recipe.model.model_dump() == {"name": "m", "vlm": {"freeze_vision_encoder": True}}
    assert recipe.upstream_value("trainer.model.cp") == 2
    assert recipe.upstream_value("trainer.model.lora.rank", 16) == 16


def test_a_prime_recipe_reads_back_from_the_toml_it_prints() -> None:
    original = prime_recipe(ckpt={}, trainer={"optim": {"max_norm": "None"}}, prime_rl={"version": "0.8.0"})
    assert original.upstream_value("trainer.optim.max_norm", "kept") is None
    assert any_from_data(tomllib.loads(to_toml(original.to_data()))) == original


def test_overrides_reach_prime_rls_tables(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(minimal()))
    overrides = ["--orchestrator.train.source.0.env.taskset.num", "7", "--inference.vllm.max_model_len=4096"]
    recipe = load_any(path, overrides)
    assert isinstance(recipe, PrimeRecipe)
    assert recipe.upstream_value("inference.vllm.max_model_len") == 4096
    assert recipe.upstream["orchestrator"]["train"]["source"][0]["env"]["taskset"]["num"] == 7


@pytest.mark.parametrize("name", OWNED)
def test_a_key_that_is_ours_to_set_is_refused_with_what_to_do_instead(name: str) -> None:
    assert complaint(**nested(name, "x")).startswith(f'{name} (x) can\'t be set with site.backend "prime-rl": ')


@pytest.mark.parametrize("path", LOSS_PATHS)
def test_the_loss_is_ours_and_the_one_inside_it_anybodys(path: str) -> None:
    loss = {"type": "custom", "import_path": path, "kwargs": {"inner": "my_package.my_loss", "strength": 0.5}}
    assert prime_recipe(trainer={"loss": loss}).upstream_value("trainer.loss.kwargs.inner") == "my_package.my_loss"
    said = complaint(trainer={"loss": loss | {"import_path": "my_package.my_loss"}})
    assert "trainer.loss.import_path (my_package.my_loss) can't be set" in said and "trainer.loss.kwargs.inner" in said


@pytest.mark.parametrize("name", PORTS)
def test_ports_are_ours_only_where_sites_share_a_machine(name: str) -> None:
    assert prime_recipe(**nested(name, 5)).upstream_value(name) == 5
    assert prime_recipe(**nested(name, 5), sites={"count": 2}, slurm={}).upstream_value(name) == 5
    message = complaint(**nested(name, 5), sites={"count": 2})
    assert message.startswith(f"{name} (5) can't be set with sites.count (2)") and "prime_rl.first_port" in message


@pytest.mark.parametrize("table", ["env_vars", "trainer.env_vars", "inference.deployment.prefill_env_vars"])
def test_credentials_and_our_own_variables_stay_out_of_files(table: str) -> None:
    assert complaint(**nested(f"{table}.AWS_SECRET_ACCESS_KEY", "hush")) == (
        f"{table}.AWS_SECRET_ACCESS_KEY would be written into files, and credentials belong in none: drop the key, and "
        "export AWS_SECRET_ACCESS_KEY where the site is started"
    )
    assert "hush" not in complaint(**nested(f"{table}.HF_TOKEN", "hush"))
    assert complaint(**nested(f"{table}.COMPOSER_PRIME_OUTER", "s3://x")).startswith(
        f'{table}.COMPOSER_PRIME_OUTER can\'t be set with site.backend "prime-rl"'
    )
    assert prime_recipe(**nested(f"{table}.NCCL_DEBUG", "INFO")).upstream_value(f"{table}.NCCL_DEBUG") == "INFO"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"outter": {}}, "outter isn't a known key: did you mean outer?"),
        ({"orchestrater": {}}, "orchestrater isn't a known key: did you mean orchestrator?"),
        ({"wandb": {}}, "wandb isn't a known key: remove it, or use one of run, max_steps, "),
        ({"prime_rl": {"version": "0.6.0"}}, "prime_rl.version (0.6.0) must be 'auto', '0.8.0' or '559b447': "),
        ({"prime_rl": {"comand": []}}, "prime_rl.comand isn't a known key: did you mean prime_rl.command?"),
        ({"model": {}}, "model.name is missing: "),
        (
            {"trainer": {"model": {"full_offload": True}}},
            "trainer.model.full_offload must be off with an outer loop, ",
        ),
        (
            {"outer": {"inner_steps": 10, "grace_s": 1200}, "inference": {}},
            "outer.grace_s (1200) must be smaller than weight_broadcast.timeout (1200), ",
        ),
        (
            {"outer": {"inner_steps": 10, "grace_s": 60}, "weight_broadcast": {"type": "nixl", "timeout": 50}},
            "outer.grace_s (60) must be smaller than weight_broadcast.timeout (50), ",
        ),
        (
            {
                "deployment": {"type": "multi_node"},
                "slurm": {"shared_fs": False, "pre_run_command": "uv pip install composer-prime"},
            },
            "slurm.shared_fs (false) gives each node an environment of its own, ",
        ),
        ({"ckpt": {"output_dir": "/shared"}}, "ckpt.output_dir (/shared) can't be set with "),
        ({"outer": {"inner_steps": 9, "fragments": 2}}, "outer.inner_steps (9) must be a multiple of outer.fragments "),
        ({"max_steps": 5}, "max_steps (5) must be at least outer.inner_steps (10): "),
    ],
)
def test_bad_input_is_answered_in_one_line(tables: dict[str, Any], message: str) -> None:
    assert complaint(**tables).startswith(message)


@pytest.mark.parametrize(
    "tables",
    [
        {"slurm": {"shared_fs": False, "pre_run_command": "srun --ntasks-per-node=1 uv pip install composer-prime"}},
        {"slurm": {"shared_fs": False}, "trainer": {"env_vars": {"PYTHONPATH": "/shared/composer-prime"}}},
        {"slurm": {"shared_fs": False}, "env_vars": {"PYTHONPATH": "/shared/python"}},
        {"slurm": {"shared_fs": True, "pre_run_command": "uv pip install composer-prime"}},
    ],
)
def test_nodes_with_environments_of_their_own_are_taken_where_each_gets_our_package(tables: dict[str, Any]) -> None:
    assert prime_recipe(deployment={"type": "multi_node"}, **tables).upstream["slurm"] == tables["slurm"]


@pytest.mark.parametrize("broadcast", [{"type": "filesystem"}, {"type": "nccl", "timeout": "soon"}])
def test_a_long_grace_is_taken_where_weights_go_over_files_or_prime_rl_refuses_the_time_out(
    broadcast: dict[str, Any],
) -> None:
    assert prime_recipe(outer={"inner_steps": 10, "grace_s": 5000}, weight_broadcast=broadcast).outer


def test_a_long_grace_is_taken_by_versions_that_wait_for_no_last_broadcast() -> None:
    assert prime_recipe(outer={"inner_steps": 10, "grace_s": 5000}, inference={}, prime_rl={"version": "0.8.0"}).outer


def test_no_key_is_both_ours_and_theirs() -> None:
    assert not set(UPSTREAM_TABLES) & set(PrimeRecipe.model_fields)
    assert not set(UPSTREAM_TABLES) & set(OWNED)
