"""`launch --smoke`: one small job a platform finds what a site would need, or says what it doesn't; nothing is left."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from composer_prime.config import load_any
from composer_prime.executors.base import Executor, Resources
from composer_prime.launch.plan import SMOKE_S, plan_launch, smoke_plan
from composer_prime.launch.records import Launch
from composer_prime.redaction import SECRET_NAMES_VARIABLE
from composer_prime.store import open_store
from composer_prime.volunteers.doctor import examine_job
from tests.architecture import REPOSITORY
from tests.executors.platforms import LoopbackPlatform
from tests.executors.registry import PLATFORM_PARAMS, reachable
from tests.patience import PATIENCE_S, wait_until

RECIPE = REPOSITORY / "recipes/local/two_sites.toml"
HANGS = "#!/bin/sh\necho it hangs\nexec sleep 1000\n"


@pytest.fixture
def platform(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoopbackPlatform]:
    with reachable(request.param, tmp_path / "platform", monkeypatch) as opened:
        yield opened


def options(platform: LoopbackPlatform, uri: str, *more: str) -> list[str]:
    told = ["launch", str(RECIPE), "--on", platform.launch_option(), "--image", "any", "--smoke", "--poll-s", "0.2"]
    return [*told, "--outer.store", uri, *more]


def smoke(platform: LoopbackPlatform, uri: str, *more: str) -> "subprocess.Popen[str]":
    """Begun in a process of its own."""
    command = [sys.executable, "-m", "composer_prime.cli.main", *options(platform, uri, "--yes", *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """(exit code, what it printed), at its end."""
    said, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said


def objects(uri: str) -> list[str]:
    with closing(open_store(uri)) as store:
        return store.list("")


def nothing_runs(executor: Executor, said: str) -> bool:
    """Whether every job that the output names has ended, and there is one."""
    runs = set(re.findall(r"smoke-[0-9a-f]{8}-[0-9a-f]{8}", said))
    jobs = [job for run in runs for job in executor.find(run)]
    return len(jobs) == 1 and all(executor.poll(job).state.final for job in jobs)


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORM_PARAMS, indirect=True)
def test_a_job_reaches_the_bucket_and_nothing_is_left_in_it(
    platform: LoopbackPlatform, store_uri: Callable[[str], str]
) -> None:
    uri = store_uri("seaweed")
    code, said = ended(smoke(platform, uri))
    assert code == 0, said
    assert "r0 attempt 1: succeeded, exit code 0 after" in said and "r1" not in said
    for found in (
        "torch",
        "link",
        "packages     environments: reverse-letters",
        "secrets      AWS_ACCESS_KEY_ID, AWS_",
    ):
        assert f"ok    {found}" in said
    assert f"{platform.launch_option()}: account, packages, secrets and bucket are right" in said
    assert objects(uri) == []
    with closing(platform.executor()) as executor:
        assert nothing_runs(executor, said)


def test_a_folder_is_as_it_was(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_PRIME_STATE", str(tmp_path / "state"))
    (tmp_path / "bucket").mkdir()
    store = ("--outer.store", tmp_path / "bucket")
    answer = cli("launch", RECIPE, "--on", "local", "--smoke", "--poll-s", "0.2", *store)
    assert answer.code == 0, answer
    assert [each for each in (tmp_path / "bucket").rglob("*") if each.is_file()] == []


@pytest.mark.s3
@pytest.mark.parametrize("platform", ["hf-jobs"], indirect=True)
def test_a_job_without_the_buckets_keys_says_so_and_fails(
    platform: LoopbackPlatform, store_uri: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = store_uri("seaweed")
    pairs = ("aws_access_key_id", "AWS_ACCESS_KEY_ID"), ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY")
    lines = [f"{key} = {os.environ[variable]}" for key, variable in pairs]
    (tmp_path / "credentials").write_text("\n".join(["[default]", *lines]))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for _, variable in pairs:
        monkeypatch.delenv(variable)
    code, said = ended(smoke(platform, uri, "--unchecked"))
    assert code == 1 and "credentials" in said, said
    assert "r0: given up: exit code 2: its log says what to mend" in said
    assert "are not known to be right: see above" in said
    assert objects(uri) == []


def test_a_secret_that_did_not_come_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_NAMES_VARIABLE, "HF_TOKEN,WANDB_API_KEY")
    monkeypatch.setenv("HF_TOKEN", "one-that-is-there")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    diagnosis = examine_job(load_any(RECIPE), str(tmp_path / "bucket"))
    failed = [(check.name, check.found) for check in diagnosis.checks if check.verdict == "fail"]
    assert failed == [("secrets", "WANDB_API_KEY isn't set")] and not diagnosis.is_able


@pytest.mark.s3
@pytest.mark.parametrize("platform", ["ssh"], indirect=True)
@pytest.mark.parametrize("how", ["time-out", "Ctrl-C"])
def test_a_job_that_hangs_is_ended(
    platform: LoopbackPlatform, how: str, store_uri: Callable[[str], str], tmp_path: Path
) -> None:
    uri, programs = store_uri("seaweed"), tmp_path / "platform/left/.composer-prime/venv/bin"
    programs.mkdir(parents=True)
    (programs / "composer-prime").write_text(HANGS)
    (programs / "composer-prime").chmod(0o755)
    process = smoke(platform, uri, *(["--timeout-hours", "0.001"] if how == "time-out" else []))
    if how == "Ctrl-C":
        wait_until(lambda: list(tmp_path.glob("platform/left/.composer-prime/jobs/*/r0/1/log")), "its job")
        wait_until(lambda: any(key.endswith("/job.json") for key in objects(uri)), "its record")
        process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert "it hangs" in said, said
    assert (code, "r0: given up: timed-out\n" in said) == ((1, True) if how == "time-out" else (130, False)), said
    assert objects(uri) == []
    with closing(platform.executor()) as executor:
        assert nothing_runs(executor, said)


@pytest.mark.s3
@pytest.mark.parametrize("platform", ["sky"], indirect=True)
def test_a_job_without_a_machine_is_ended_and_nobody_is_billed_unasked(
    cli, platform: LoopbackPlatform, store_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer_prime.cli.launch.SMOKE_QUEUE_S", 0.0)
    uri = store_uri("seaweed")
    told = options(platform, uri, "--timeout-hours", "0.001")
    with platform.hold_pending():  # type: ignore[attr-defined]
        unasked = cli(*told)
        assert unasked.code == 2 and "say --yes" in unasked.err and " an hour" in unasked.out, "no --max-cost is wanted"
        answer = cli(*told, "--yes")
    assert answer.code == 1 and "no machine in time: see your quota and credit there" in answer.err, answer
    assert objects(uri) == []
    with closing(platform.executor()) as executor:
        assert nothing_runs(executor, answer.out)


def test_the_plan_is_one_small_job_on_each_platform_with_what_a_site_gets_but_its_gpus() -> None:
    settings = ["--outer.store", "s3://b/r", "--launch.image", "any", "--launch.region", "us-east"]
    settings += ["--launch.caches.weights", "/cache"]
    recipe = load_any(REPOSITORY / "recipes/multi_site/reverse_text_2.toml", settings)
    plan = plan_launch(recipe, "modal:2,hf-jobs:1,ssh:gpu1", environment={"HF_TOKEN": "secret-of-mine"})
    small, launch = smoke_plan(plan), Launch(number=1, name="smoke-00000000")
    assert small.places == {"r0": "modal", "r1": "hf-jobs", "r2": "ssh:gpu1"}
    assert small.resources == Resources(cpus=1.0, memory_gib=4.0, region="us-east") and plan.resources.gpu_count == 2
    ours, theirs = small.spec(launch, "r1", 1), plan.spec(launch, plan.sites[2], 1)
    assert (ours.image, list(ours.secrets), ours.env) == (theirs.image, ["HF_TOKEN"], theirs.env)
    assert (ours.timeout_s, ours.caches) == (SMOKE_S, {}) and ours.command[-1] == "--smoke"
    assert small.run_uri.startswith(f"{plan.run_uri}/probe/smoke-")
