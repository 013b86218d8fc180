"""Every recipe goes through PRIME-RL's own `rl --dry-run`, of the checkout that PRIME_RL_SRC names.

The interpreter is PRIME_RL_PYTHON, or ours: it needs what upstream's configuration imports, and no GPU. Tasksets that
it doesn't have are stood in for, so that what is checked is the configuration.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.graph import MessageNode

from composer_prime.config import RunPaths, run_uri
from composer_prime.config.prime_rl import PrimeRlConfig
from composer_prime.plan.memory import batch_size, share_gpus
from composer_prime.sites.prime_rl.installation import find_installation
from composer_prime.sites.prime_rl.launch import run_local, run_site
from composer_prime.sites.prime_rl.toml import LOSS_PATH
from tests.architecture import REPOSITORY
from tests.recipes.test_recipes import RECIPES, load
from tests.sites.prime_rl.scoring import pairs, write

SOURCE = os.environ.get("PRIME_RL_SRC", "")
pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.skipif(not SOURCE, reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]

TASKSET = """
import verifiers.v1 as vf

class Config(vf.TasksetConfig):
    dataset_name: str = ""
    dataset_subset: str = ""

class Taskset(vf.Taskset[vf.Task, Config]):
    pass

__all__ = ["Taskset"]
"""
EVAL = """
[orchestrator.eval]
interval = 8                    # H: each evaluation scores masters

[[orchestrator.eval.source]]
name = "held-out"

[orchestrator.eval.source.env.taskset]
id = "reverse-text"

[orchestrator.eval.source.env.agent.harness]
id = "null"

[orchestrator.eval.source.env.agent.runtime]
type = "subprocess"
"""
PAIRS = """
[[orchestrator.train.source]]
name = "pairs"
ratio = 0.25
group_size = 1

[orchestrator.train.source.env.taskset]
id = "composer-prime-pairs"
store = "{store}"
file = "{file}"

[orchestrator.train.source.env.reference]
base_url = "http://127.0.0.1:8000"

[orchestrator.train.source.env.pairs]
sft_tau = 0.5
"""
TASKSETS = [f"{name}{version}" for name in ("math_env", "reverse_text", "scaleswe") for version in ("", "_v1")]


@pytest.fixture(scope="module")
def rl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's `rl` as an installation has it: an entrypoint with its Python beside it."""
    folder = tmp_path_factory.mktemp("prime-rl")
    roots = [f"{SOURCE}/src", f"{SOURCE}/packages/prime-rl-configs/src", os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join([*filter(None, roots), str(REPOSITORY), str(folder)])
    python = f'PYTHONPATH="{paths}" exec "{os.environ.get("PRIME_RL_PYTHON", sys.executable)}"'
    (folder / "python").write_text(f'#!/bin/sh\n{python} "$@"\n')
    (folder / "rl").write_text(f'#!/bin/sh\n{python} -c "from prime_rl.entrypoints.rl import main; main()" "$@"\n')
    for name in ("python", "rl"):
        (folder / name).chmod(0o755)
    ask = "import sys; from importlib.util import find_spec; print(*[n for n in sys.argv[1:] if find_spec(n) is None])"
    answer = subprocess.run([folder / "python", "-c", ask, *TASKSETS], capture_output=True, text=True, check=True)
    for name in answer.stdout.split():
        (folder / f"{name}.py").write_text(TASKSET)
    return folder / "rl"


def resolved(folder: Path, role: str) -> dict[str, Any]:
    """What `rl` made of a role's configuration: JSON, or TOML before 559b447."""
    if (folder / f"{role}.json").exists():
        return json.loads((folder / f"{role}.json").read_text())
    return tomllib.loads((folder / f"{role}.toml").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_upstream_accepts_the_recipe(path: Path, rl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    recipe = load(path, "--output_dir", str(tmp_path), "--prime_rl.command", f'["{rl}"]')
    said: list[str] = []
    if recipe.sites.count > 1:
        code = run_local(recipe, False, dry_run=True, say=said.append)
    else:
        code = run_site(recipe, "a", False, dry_run=True, say=said.append)
    assert code == 0, "\n".join(said)
    run = RunPaths(RunPaths.of(recipe).root.with_name(f"{recipe.run.name}.dry-run"))
    for site in recipe.site_names:
        configs = run.site(site).root / "prime-rl" / "configs"
        if recipe.upstream.get("slurm") and recipe.upstream["deployment"].get("type") != "multi_node":
            continue
        trainer, orchestrator = resolved(configs, "trainer"), resolved(configs, "orchestrator")
        assert trainer["loss"]["import_path"] == LOSS_PATH
        assert trainer["env_vars"].get("COMPOSER_PRIME_OUTER") == run_uri(recipe)
        assert trainer["env_vars"].get("COMPOSER_PRIME_SITE") == (site if recipe.outer else None)
        assert orchestrator["max_steps"] == trainer["max_steps"] == recipe.max_steps
        assert trainer["output_dir"] == str(run.site(site).root / "prime-rl")


def test_upstream_accepts_a_recipe_that_was_fitted_to_a_smaller_machine(rl: Path, tmp_path: Path) -> None:
    path = REPOSITORY / "recipes/multi_site/math_4b_4.toml"
    recipe = load(path, "--output_dir", str(tmp_path), "--prime_rl.command", f'["{rl}"]')
    fitted, _ = share_gpus(recipe, 4_000_000_000, [80 * 2**30] * 3)
    said: list[str] = []
    assert run_site(fitted, "a", False, dry_run=True, say=said.append) == 0, "\n".join(said)
    configs = next(tmp_path.glob("*.dry-run")) / "sites" / "a" / "prime-rl" / "configs"
    assert resolved(configs, "orchestrator")["batch_size"] == batch_size(fitted) == 64 < batch_size(recipe)
    inference = resolved(configs, "inference")
    parallel = inference.get("vllm") or inference["parallel"]
    assert parallel.get("data_parallel_size", parallel.get("dp")) == fitted.layout.infer == 2


def test_upstreams_job_installs_us_on_every_node_where_each_has_an_environment_of_its_own(
    rl: Path, tmp_path: Path
) -> None:
    install = "srun --ntasks-per-node=1 uv pip install --no-deps /shared/composer-prime"
    path = REPOSITORY / "recipes/multi_site/swe_30b_a3b_2.toml"
    slurm = ("--slurm.shared_fs", "false", "--slurm.pre_run_command", install)
    recipe = load(path, "--output_dir", str(tmp_path), "--prime_rl.command", f'["{rl}"]', *slurm)
    said: list[str] = []
    assert run_site(recipe, "a", False, dry_run=True, say=said.append) == 0, "\n".join(said)
    (job,) = tmp_path.rglob("rl.sbatch")
    script = job.read_text()
    steps = ("srun --ntasks-per-node=1 bash", "&& uv sync", install, "uv run torchrun")
    assert sorted(steps, key=script.index) == list(steps)


def test_upstream_evaluates_beside_an_outer_run(rl: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text((REPOSITORY / "recipes/multi_site/reverse_text_2.toml").read_text() + EVAL)
    recipe = load(path, "--output_dir", str(tmp_path), "--prime_rl.command", f'["{rl}"]')
    said: list[str] = []
    assert run_site(recipe, "a", False, dry_run=True, say=said.append) == 0, "\n".join(said)
    configs = next(tmp_path.glob("*.dry-run")) / "sites" / "a" / "prime-rl" / "configs"
    (source,) = [value for key, value in resolved(configs, "orchestrator")["eval"].items() if key in ("source", "env")]
    assert [(one["name"], one["interval"]) for one in source] == [("held-out", 8)]
    assert resolved(configs, "trainer")["env_vars"]["COMPOSER_PRIME_OUTER"] == run_uri(recipe)


@pytest.mark.skipif(
    "loss_weights" not in MessageNode.model_fields,
    reason="this verifiers has no loss_weights: pairs need PRIME-RL 0.8.1.dev52 or newer",
)
def test_upstream_tells_the_server_of_a_source_of_pairs_all_that_its_recipe_says(rl: Path, tmp_path: Path) -> None:
    files = write(tmp_path, pairs(2))
    path = tmp_path / "recipe.toml"
    text = (REPOSITORY / "recipes/multi_site/reverse_text_2.toml").read_text()
    path.write_text(text + PAIRS.format(**files))
    recipe = load(path, "--output_dir", str(tmp_path), "--prime_rl.command", f'["{rl}"]')
    said: list[str] = []
    assert run_site(recipe, "a", False, dry_run=True, say=said.append) == 0, "\n".join(said)
    configs = next(tmp_path.glob("*.dry-run")) / "sites" / "a" / "prime-rl" / "configs"
    env = resolved(configs / "envs" / "train", "pairs")["env"]
    assert env["seq_len"] == recipe.upstream["seq_len"] and env["taskset"]["file"] == str(files["file"])
    assert (env["pairs"]["loss"], env["pairs"]["sft_tau"]) == ("dpo", 0.5)
    assert env["reference"]["base_url"] == "http://127.0.0.1:8000"


def test_the_checkout_is_a_version_we_know(rl: Path) -> None:
    assert find_installation(PrimeRlConfig(command=(str(rl),))).version in ("0.8.0", "559b447")
