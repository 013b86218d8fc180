"""Hugging Face Jobs through the real client, against the loopback: what the contract of executors doesn't ask."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import JobInfo

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors import services
from composer_prime.executors.base import JobSpec, JobState, Resources, Secrets
from composer_prime.executors.hf_jobs import NAMESPACE_VARIABLE, HfJobsExecutor, JobsApi, status_of
from composer_prime.executors.open import open_executor
from tests.executors.loopback_hf_jobs import HfJobsPlatform
from tests.executors.loopback_hf_jobs_routes import BROKE_TOKEN, READING_TOKEN, USER

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")
SECRET = "s3cr3t-value-of-a-key"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[HfJobsPlatform]:
    loopback = HfJobsPlatform(tmp_path / "service")
    yield loopback
    loopback.close()


@pytest.fixture
def executor(service: HfJobsPlatform) -> HfJobsExecutor:
    return service.executor()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Our pauses before repeats, which are not waited for; nor are the client's."""
    waited: list[float] = []
    monkeypatch.setattr(services, "time", SimpleNamespace(sleep=waited.append, monotonic=time.monotonic))
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda pause_s: None))
    return waited


def spec(*command: str, site: str = "a", **more: Any) -> JobSpec:
    plain = JobSpec("demo.v1", site, 1, command or SLEEP, timeout_s=60, image="python:3.12")
    return replace(plain, **more)


def stages(service: HfJobsPlatform) -> list[str]:
    return [hosted.container.stage for hosted in service.hosted.values()]


def posts(service: HfJobsPlatform) -> list[str]:
    return [path for method, path in service.requests if method == "POST"]


def test_the_request_holds_what_the_spec_says(service, executor):
    executor.submit(spec(env={"A": "1"}, secrets=Secrets({"KEY": SECRET}), timeout_s=7200))
    (hosted,) = service.hosted.values()
    assert hosted.request["timeoutSeconds"] == 7200
    assert hosted.request["flavor"] == "cpu-basic"
    assert hosted.request["dockerImage"] == "python:3.12"
    assert hosted.request["environment"] == {"A": "1"}
    assert hosted.request["secrets"] == {"KEY": SECRET}
    assert hosted.request["labels"] == {
        "composer-prime-run": "demoDOTv1",
        "composer-prime-site": "a",
        "composer-prime-attempt": "1",
        "name": "demoDOTv1--a--1",
    }


@pytest.mark.parametrize("given", ["", "an-org"], ids=["not given", "given"])
def test_whose_jobs_they_are_is_asked_once_and_not_at_all_when_it_is_given(service, executor, monkeypatch, given):
    monkeypatch.setenv(NAMESPACE_VARIABLE, given)
    service.requests.clear()
    job = executor.submit(spec())
    executor.poll(job)
    assert job.id.startswith(f"{given or USER}/")
    assert [path for _, path in service.requests].count("/api/whoami-v2") == (not given)


def test_a_log_is_awaited_while_its_job_is_pending_and_each_line_given_once(service, executor):
    with service.hold_pending():
        job = executor.submit(spec(sys.executable, "-c", "print('one'); print('two')"))
        assert list(executor.logs(job)) == []
        threading.Timer(0.2, service.hosted[job.id.partition("/")[2]].container.may_start.set).start()
        assert list(executor.logs(job, follow=True)) == ["one", "two"]


def test_runs_and_sites_with_dots_are_found_by_their_names(executor):
    started = [executor.submit(spec(site=site)) for site in ("b.1", "a")]
    assert [job.site for job in started] == ["b.1", "a"]
    assert executor.find("demo.v1") == started[::-1]
    assert executor.find("demo") == []


def test_jobs_of_others_are_not_taken_for_ours_by_a_service_that_ignores_labels(service, executor):
    service.ignores_labels = True
    service.start(USER, _foreign())
    mine = executor.submit(spec())
    assert executor.find("demo.v1") == [mine]


def _foreign() -> dict[str, object]:
    return {"dockerImage": "x", "command": [*SLEEP], "arguments": [], "environment": {}, "flavor": "cpu-basic"}


def test_more_jobs_than_a_page_are_found(service, executor):
    with service.hold_pending():
        started = [executor.submit(spec(site=f"s{number:02}")) for number in range(12)]
        assert executor.find("demo.v1") == started
        for job in started:
            executor.cancel(job)


def test_of_two_that_did_not_see_each_other_the_older_stays_for_both(service):
    service.blind_listings = 2  # each looks before the other's job shows
    first = service.executor().submit(spec())
    service.blind_listings = 1
    second = service.executor().submit(spec())
    assert second == first
    assert len(posts(service)) == 3  # two jobs, and the end of one
    assert stages(service) == ["RUNNING", "CANCELED"]


def test_doubles_that_killed_submitters_left_are_ended_by_the_next_submit(service, executor):
    job = executor.submit(spec())
    service.start(USER, dict(service.hosted[job.id.partition("/")[2]].request))
    assert executor.find("demo.v1") == [job]
    assert service.executor().submit(spec()) == job
    assert stages(service) == ["RUNNING", "CANCELED"]


def test_cancel_ends_doubles_too(service, executor):
    job = executor.submit(spec())
    service.start(USER, dict(service.hosted[job.id.partition("/")[2]].request))
    assert executor.cancel(job).state is JobState.CANCELLED
    assert stages(service) == ["CANCELED", "CANCELED"]


def test_a_service_that_breaks_while_a_job_is_submitted_leaves_a_hint(service, executor, waits):
    executor.check(spec())
    executor.log_in()
    service.trouble("503", 1000)
    with pytest.raises(ExecutorError, match="may have been started: launch again, which finds it"):
        executor.submit(spec())


@pytest.mark.parametrize(
    ("token", "cause"),
    [
        ("hf_wrong", r"401.*token is not valid: set HF_TOKEN, or sign in with `hf auth login`"),
        (BROKE_TOKEN, r"402 \(Pre-paid credit balance is insufficient\).*huggingface.co/settings/billing"),
        (READING_TOKEN, r"403.*may not start and manage jobs.*huggingface.co/settings/tokens"),
    ],
)
def test_a_token_that_will_not_do_is_refused_with_the_remedy(service, token, cause):
    with pytest.raises(BadInput, match=cause) as refused:
        HfJobsExecutor(endpoint=service.url, token=token).submit(spec())
    assert "\n" not in str(refused.value)
    assert service.hosted == {}


def test_no_token_at_all_is_refused_before_anything_is_asked(service, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(BadInput, match="needs a token, and there is none: set HF_TOKEN"):
        HfJobsExecutor(service.url).log_in()
    assert service.requests == []


def test_an_unknown_namespace_is_refused(executor, monkeypatch):
    monkeypatch.setenv(NAMESPACE_VARIABLE, "nobody")
    with pytest.raises(BadInput, match="no such namespace, or hides it: correct COMPOSER_PRIME_HF_NAMESPACE"):
        executor.submit(spec())


def test_offline_mode_is_named(executor, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match=r"HF_HUB_OFFLINE is set.*unset it"):
        executor.log_in()


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"run": "a run"}, r"run \('a run'\) must be .* letters"),
        ({"run": "aDOTb"}, r"run \(aDOTb\) must not hold 'DOT', which stands for a dot in labels"),
        ({"resources": Resources(gpu="H100", gpu_count=1)}, r"no GPU 'H100': nearest are .*H200"),
    ],
)
def test_what_could_not_run_is_refused_before_anything_is_started(service, executor, change, cause):
    for refused in (executor.check, executor.submit):
        with pytest.raises(BadInput, match=cause):
            refused(spec(**change))
    assert posts(service) == []


def test_secrets_are_refused_while_the_client_would_print_them(executor, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_DEBUG", True)
    executor.check(spec())
    with pytest.raises(BadInput, match="HF_DEBUG is set"):
        executor.check(spec(secrets=Secrets({"KEY": SECRET})))


@pytest.mark.parametrize("name", ["tester/0123", "no-such-job", f"{USER}/{'0' * 24}", f"{USER}/../{'0' * 24}"])
def test_a_job_that_is_not_there_is_unknown(executor, name):
    job = replace(executor.submit(spec()), id=name)
    asked: list[Callable[[], object]] = [
        lambda: executor.poll(job),
        lambda: executor.cancel(job),
        lambda: list(executor.logs(job)),
        lambda: list(executor.logs(job, follow=True)),
    ]
    for ask in asked:
        with pytest.raises(JobUnknown):
            ask()


def test_a_job_that_ends_just_before_it_is_cancelled_stays_as_it_ended(service, executor, monkeypatch, tmp_path):
    go = tmp_path / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)"
    job = executor.submit(spec(sys.executable, "-c", wait))
    ask = JobsApi.ask

    def ends_before(api: JobsApi, method: str, **arguments: Any) -> Any:
        if method == "cancel_job":
            go.touch()
            service.hosted[job.id.partition("/")[2]].container.wait()
        return ask(api, method, **arguments)

    monkeypatch.setattr(JobsApi, "ask", ends_before)
    assert executor.cancel(job).state is JobState.SUCCEEDED


def test_a_job_that_does_not_end_may_be_billed_and_the_error_says_so(service, executor, monkeypatch):
    service.stage_lag_s = 0.5
    monkeypatch.setattr(HfJobsExecutor, "confirm_s", 0.1)
    job = executor.submit(spec())
    said = f"RUNNING 0.1 s after it was cancelled: job {job.id} may still run, and be billed: see http"
    with pytest.raises(ExecutorError, match=said):
        executor.cancel(job)


def test_a_job_that_can_not_be_cancelled_may_be_billed_and_the_error_says_so(service, executor, waits):
    job = executor.submit(spec())
    service.trouble("503", 20)
    service.troubles.appendleft(None)
    with pytest.raises(ExecutorError, match=f"503.*job {job.id} may still run, and be billed: see http"):
        executor.cancel(job)
    service.troubles.clear()


def test_the_price_is_the_services_own_and_else_the_tables(service, executor):
    wanted = spec(resources=Resources(gpu="H200", gpu_count=2))
    price = executor.price(wanted)
    assert price.overrun_s >= 60, "billed by the minute"
    assert price.usd_per_hour == 10.0 and f"{service.url}/api/jobs/hardware" in price.source
    service.trouble("503", 1)
    unreached = service.executor().price(wanted)
    assert unreached.usd_per_hour == 10.0 and "docs/hub/jobs-pricing" in unreached.source


@pytest.mark.parametrize(
    ("stage", "said", "state", "exit_code"),
    [
        ("SCHEDULING", None, JobState.PENDING, None),
        ("RUNNING", None, JobState.RUNNING, None),
        ("UPDATING", None, JobState.RUNNING, None),
        ("COMPLETED", None, JobState.SUCCEEDED, 0),
        ("CANCELED", None, JobState.CANCELLED, None),
        ("DELETED", None, JobState.CANCELLED, None),
        ("ERROR", "Job timeout", JobState.TIMED_OUT, None),
        ("ERROR", "Job failed with exit code: 1. Reason: Error", JobState.FAILED, 1),
        ("ERROR", "Job failed with exit code: 128. Reason: StartError", JobState.FAILED, 128),
        ("ERROR", "Job failed with exit code: 137. Reason: OOMKilled", JobState.FAILED, -9),
        ("ERROR", "Job failed with exit code: 137. Reason: Evicted", JobState.PREEMPTED, None),
        ("ERROR", "something that nobody has seen", JobState.FAILED, None),
        ("ERROR", None, JobState.FAILED, None),
    ],
)
def test_a_stage_and_its_message_mean(stage, said, state, exit_code):
    info = JobInfo(
        id="0" * 24,
        status={"stage": stage, "message": said},
        owner={"id": "1", "name": USER, "type": "user"},
        createdAt="2026-11-22T04:00:00.000Z",
        startedAt="2026-11-22T04:00:10.500Z",
    )
    status = status_of(info)
    assert (status.state, status.exit_code) == (state, exit_code)
    assert json.dumps(status.message).count(stage) == 1 and (said or "") in status.message
    assert status.started_at == 1795320010.5 and status.ended_at is None


def test_a_missing_client_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "composer_prime.executors.hf_jobs")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BadInput, match=r"isn't installed \(huggingface_hub\): .* pip install -e '\.\[hf\]'"):
        open_executor("hf-jobs")
