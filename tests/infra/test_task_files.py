"""The task files for SkyPilot and dstack: keys that their documentation lists, no credential, a command that is ours.

Together the tools take half a gigabyte, and one wants an older click than ours, so no test installs them. Where one is
on the PATH, in an environment of its own, its parser is asked too: `make test-task-files` makes one for both.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture import REPOSITORY
from tests.infra.scripts import linter
from tests.infra.site_commands import fill, read_site_command
from tests.patience import PATIENCE_S

SKYPILOT = REPOSITORY / "infra/skypilot/site.yaml"
DSTACK = REPOSITORY / "infra/dstack/site.dstack.yml"
CREDENTIALS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}

SKYPILOT_KEYS = {
    "": {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run"},
    "resources": {
        "infra", "accelerators", "cpus", "memory", "instance_type", "use_spot", "disk_size", "disk_tier", "ports",
        "image_id", "labels", "any_of", "ordered", "job_recovery", "autostop",
    },
    "resources.job_recovery": {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"},
}  # fmt: skip
"""As in SkyPilot 0.14's description of a task's YAML."""
DSTACK_KEYS = {
    "": {
        "type", "name", "image", "env", "commands", "resources", "nodes", "ports", "python", "working_dir", "volumes",
        "files", "repos", "backends", "regions", "instance_types", "spot_policy", "retry", "max_duration", "max_price",
        "stop_duration", "creation_policy", "idle_duration", "priority", "fleets", "tags", "user", "privileged",
    },
    "resources": {"cpu", "memory", "shm_size", "gpu", "disk"},
    "retry": {"on_events", "duration"},
}  # fmt: skip
"""As in dstack 0.22's reference of a task."""

READ_BY_SKYPILOT = """
import sys, yaml
from sky import Task
config = yaml.safe_load(open(sys.argv[1]))
task = Task.from_yaml_config(config, secrets_overrides=[(name, "given") for name in config["secrets"]])
resources = next(iter(task.resources))
print(task.name, resources.accelerators, resources.use_spot, sorted(task.secrets))
"""
READ_BY_DSTACK = """
import sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
print(task.type, task.name, task.resources.gpu.count.min, task.max_duration)
"""


def unknown(data: dict[str, Any], keys: dict[str, set[str]], place: str = "") -> list[str]:
    """The keys of tables that are described, which their description lacks."""
    found = []
    for key, value in data.items():
        name = f"{place}.{key}" if place else key
        if key not in keys[place]:
            found.append(name)
        elif isinstance(value, dict) and name in keys:
            found += unknown(value, keys, name)
    return found


def read_by(program: str, code: str, path: Path, home: Path) -> str:
    """What a tool's own Python says of a file; skips where the tool isn't on the PATH."""
    found = linter(program)
    if found is None:
        pytest.skip(f"{program} isn't on the PATH: make test-task-files")
    python = Path(found).parent / "python"
    done = subprocess.run(
        [python, "-c", code, path], env={"HOME": str(home)}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("path", "keys"), [(SKYPILOT, SKYPILOT_KEYS), (DSTACK, DSTACK_KEYS)], ids=["sky", "dstack"])
def test_every_key_is_one_that_the_tool_documents(path: Path, keys: dict[str, set[str]]) -> None:
    data = yaml.safe_load(path.read_text())
    assert unknown(data, keys) == []
    assert unknown({**data, "resources": {**data["resources"], "gpus": 2}}, keys) == ["resources.gpus"]


def test_skypilots_site_runs_with_its_own_values_and_asks_for_its_secrets() -> None:
    data = yaml.safe_load(SKYPILOT.read_text())
    site, recipe = read_site_command(fill(data["run"], {**data["envs"], "HOME": "/root"}))
    assert site == "a" and recipe.outer is not None and recipe.outer.store == "s3://my-bucket/runs"
    assert data["secrets"] == dict.fromkeys(CREDENTIALS) and not CREDENTIALS & data["envs"].keys()
    assert data["num_nodes"] == 1


def test_dstacks_site_runs_with_its_own_values_and_takes_its_credentials_from_who_starts_it() -> None:
    data = yaml.safe_load(DSTACK.read_text())
    values = dict(entry.split("=", 1) for entry in data["env"] if "=" in entry)
    (command,) = data["commands"]
    site, recipe = read_site_command(fill(command, values))
    assert site == "a" and recipe.outer is not None and recipe.outer.store == "s3://my-bucket/runs"
    assert {entry for entry in data["env"] if "=" not in entry} == CREDENTIALS
    assert data["type"] == "task" and data["max_duration"] and "interruption" in data["retry"]["on_events"]


def test_the_machines_have_the_gpus_that_the_recipe_takes() -> None:
    data = yaml.safe_load(SKYPILOT.read_text())
    _, recipe = read_site_command(fill(data["run"], {**data["envs"], "HOME": "/root"}))
    gpus = recipe.deployment["num_train_gpus"] + recipe.deployment["num_infer_gpus"]  # type: ignore[union-attr]
    assert data["resources"]["accelerators"].endswith(f":{gpus}")
    assert yaml.safe_load(DSTACK.read_text())["resources"]["gpu"].endswith(f":{gpus}")


def test_skypilots_own_parser_is_content(tmp_path: Path) -> None:
    said = read_by("sky", READ_BY_SKYPILOT, SKYPILOT, tmp_path)
    assert said.splitlines()[-1] == f"composer-prime-site {{'A10G': 2}} True {sorted(CREDENTIALS)}"


def test_dstacks_own_parser_is_content(tmp_path: Path) -> None:
    assert read_by("dstack", READ_BY_DSTACK, DSTACK, tmp_path) == "task composer-prime-site 2 86400"
