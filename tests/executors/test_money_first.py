"""A launch on a platform that bills shows its price and asks first; stored logins go along by name, or are missed."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from composer_prime.launch.plan import AWS_SECRETS, with_stored_logins
from composer_prime.launch.preflight import Unchecked, login_lines
from composer_prime.store import open_store
from tests.architecture import REPOSITORY
from tests.executors.launches import small_recipe
from tests.executors.registry import loopback
from tests.executors.test_as_the_recipe_says import planned

RECIPE = str(REPOSITORY / "recipes/local/two_sites.toml")
KEYS = dict(zip(AWS_SECRETS, ("AKIAEXAMPLE", "stored-secret", "stored-session"), strict=True))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches that came to their start, which is all that happens."""
    found: list[Any] = []
    monkeypatch.setattr("composer_prime.cli.launch._launch", lambda *given: found.append(given) or 0)
    return found


@pytest.mark.s3
def test_billed_jobs_want_a_limit_and_a_yes(tmp_path: Path, store_uri: Callable[[str], str]) -> None:
    uri = store_uri("seaweed")
    with closing(loopback("hf-jobs", tmp_path / "platform")) as platform:
        options = ["--on", platform.launch_option(), "--image", "any", "--outer.store", uri]
        command = [sys.executable, "-m", "composer_prime.cli.main", "launch", RECIPE, *options]
        told = [*command, "--output_dir", str(tmp_path / "out")]

        def launch(*more: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
            terminal, inside = os.openpty() if typed is not None else (None, subprocess.DEVNULL)
            if terminal is not None:
                os.write(terminal, f"{typed}\n".encode())
            env = os.environ | platform.environment()
            return subprocess.run([*told, *more], env=env, stdin=inside, capture_output=True, text=True)

        unlimited, unasked, refused = launch("--yes"), launch("--max-cost", "5"), launch("--no-limit", typed="n")
        with closing(platform.executor()) as executor, closing(open_store(f"{uri}/two-sites")) as store:
            assert list(store.list("")) == [] and executor.find("two-sites") == []
    assert unlimited.returncode == unasked.returncode == 2 and refused.returncode == 1
    assert "jobs on hf-jobs are billed: say by --max-cost" in unlimited.stderr and "--no-limit" in unlimited.stderr
    assert "nobody is there to say whether these jobs shall start: say --yes" in unasked.stderr
    for answer in (unasked, refused):
        assert "site a on hf-jobs" in answer.stdout and "all 2 sites: $" in answer.stdout
    assert refused.stdout.endswith("nothing was started\n")


def test_jobs_of_ones_own_machines_cost_nothing_and_nobody_is_asked(cli, started: list[Any], tmp_path: Path) -> None:
    assert cli("launch", RECIPE, "--on", "local", "--output_dir", tmp_path).code == 0 and len(started) == 1


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login of `hf auth login` and a profile of the AWS command line, and none in variables."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", *AWS_SECRETS, "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "token").write_text("hf_stored")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    lines = zip(("aws_access_key_id", "aws_secret_access_key", "aws_session_token"), KEYS.values(), strict=True)
    profile = "\n".join(["[default]", *(f"{key} = {value}" for key, value in lines)])
    (tmp_path / "credentials").write_text(profile)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def test_a_stored_login_goes_along_by_name_alone(stored: None) -> None:
    assert with_stored_logins({"A": "b"}, []) == {"A": "b"}
    assert with_stored_logins({}, ["HF_TOKEN"]) == {"HF_TOKEN": "hf_stored"}
    assert with_stored_logins({"HF_TOKEN": "set"}, ["HF_TOKEN"]) == {"HF_TOKEN": "set"}
    assert with_stored_logins({}, AWS_SECRETS[:2]) == dict(list(KEYS.items())[:2])


def test_a_stored_login_that_stays_here_is_said(stored: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = planned(small_recipe(launch={"image": "any"}))
    token, bucket = login_lines(plan)
    assert token == "HF_TOKEN: what `hf auth login` stored stays here; --secret HF_TOKEN hands it over"
    assert isinstance(bucket, Unchecked) and not isinstance(token, Unchecked)
    asked = " ".join(f"--secret {name}" for name in AWS_SECRETS)
    assert (
        bucket
        == f"jobs get no credentials for s3://bucket/runs/small: those stored on this machine go along by {asked}"
    )
    assert list(login_lines(planned(small_recipe(), "ssh:a,ssh:b"))) == []
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "no AWS_ACCESS_KEY_ID is set, or stored" in list(login_lines(plan))[1]
