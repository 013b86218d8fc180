"""The script that starts a site as a job of Hugging Face: `hf`'s own parser takes what it says, and nothing is sent."""

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.architecture import REPOSITORY
from tests.infra.scripts import Stage, linter
from tests.patience import PATIENCE_S

SCRIPT = REPOSITORY / "infra/hf_jobs/site.sh"
SETTINGS = {
    "NAMESPACE": "me", "IMAGE": "ghcr.io/me/composer-prime", "RECIPE": "recipes/local/two_sites.toml", "SITE": "b",
    "AWS_ACCESS_KEY_ID": "the-id", "AWS_SECRET_ACCESS_KEY": "the-secret",
}  # fmt: skip


def words(tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    stage = Stage(tmp_path, ["hf"])
    done = stage.run(SCRIPT, *arguments, **{**SETTINGS, **environment})
    assert done.returncode == 0, done.stderr
    (call,) = stage.words()
    return call


def test_the_job_is_a_site_that_resumes_with_a_limit_and_no_secret_on_the_command_line(tmp_path: Path) -> None:
    call = words(tmp_path, "--outer.store", "s3://my-bucket/runs")
    image = call.index(SETTINGS["IMAGE"])
    assert call[image + 1 :] == [
        "composer-prime", "site", SETTINGS["RECIPE"], "--site", "b", "--resume", "--output_dir", "/tmp/outputs",
        "--outer.store", "s3://my-bucket/runs",
    ]  # fmt: skip
    assert call[call.index("--timeout") + 1] == "24h"
    assert not [word for word in call if "the-id" in word or "the-secret" in word]


def test_what_a_gated_model_and_temporary_credentials_need_goes_along_as_a_secret(tmp_path: Path) -> None:
    given = {"HF_TOKEN": "the-token", "AWS_SESSION_TOKEN": "the-session"}
    call = words(tmp_path, **given)
    secrets = {name for option, name in pairwise(call) if option == "--secrets"}
    assert secrets == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", *given}
    assert not [word for word in call if "the-" in word]
    assert "HF_TOKEN" not in words(tmp_path / "without")


def test_hf_itself_takes_the_command_line(tmp_path: Path) -> None:
    hf = linter("hf")
    if hf is None:
        pytest.skip("hf isn't installed: pip install -e '.[hf]'")
    tokens = {"HF_TOKEN": "hf_none", "AWS_SESSION_TOKEN": "the-session"}
    endpoint = {"AWS_ENDPOINT_URL": "https://s3.example.com"}
    call = words(tmp_path, "--outer.store", "s3://my-bucket/runs", **tokens, **endpoint)
    variables = {name: SETTINGS[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")} | tokens
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_none", "HOME": str(tmp_path), "NO_COLOR": "1"}
    done = subprocess.run(
        [hf, "jobs", "run", "--dry-run", *call[3:]],
        env={**variables, **offline},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    job = dict(re.findall(r"^  (\w+) +(.+)$", done.stdout, re.MULTILINE))
    assert job["command"].startswith("composer-prime site ") and job["command"].endswith("s3://my-bucket/runs")
    assert (job["timeout"], job["attempts"], job["namespace"]) == ("24h", "3", "me")
    assert job["secrets"] == "AWS_ACCESS_KEY_ID=***" and "the-secret" not in done.stdout


@pytest.mark.parametrize("missing", sorted(SETTINGS))
def test_a_setting_that_lacks_is_named(tmp_path: Path, missing: str) -> None:
    environment = {name: value for name, value in SETTINGS.items() if name != missing}
    done = Stage(tmp_path, ["hf"]).run(SCRIPT, **environment)
    assert done.returncode != 0 and missing in done.stderr
