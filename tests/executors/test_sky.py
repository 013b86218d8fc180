"""SkyPilot through its API's loopback: what the contract of executors doesn't ask."""

import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors import services, sky, sky_api
from composer_prime.executors.base import Job, JobSpec, JobState, Resources, Secrets
from composer_prime.executors.sky import SkyExecutor
from tests.executors.jobs import await_end, await_running
from tests.executors.loopback_sky import SkyPlatform
from tests.executors.loopback_sky_routes import CATALOG

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
SECRET = "s3cr3t-value-of-a-key"
Opener = Callable[..., SkyExecutor]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SkyPlatform]:
    with closing(SkyPlatform(tmp_path / "server")) as loopback:
        yield loopback


@pytest.fixture
def executor(server: SkyPlatform) -> Iterator[SkyExecutor]:
    with closing(server.executor()) as opened:
        yield opened


@pytest.fixture
def opened(server: SkyPlatform) -> Iterator[Opener]:
    """Opens an executor with given arguments, by default at the server."""
    with ExitStack() as stack:

        def open_one(endpoint: str | None = server.url, token: str | None = None, **resources: Any) -> SkyExecutor:
            return stack.enter_context(closing(SkyExecutor(endpoint, token, resources)))

        yield open_one


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Our pauses before repeats, which are not waited for."""
    waited: list[float] = []
    monkeypatch.setattr(services, "time", SimpleNamespace(sleep=waited.append, monotonic=time.monotonic))
    return waited


def spec(*command: str, site: str = "a", **more: Any) -> JobSpec:
    return replace(JobSpec("demo.v1", site, 1, command or SLEEP, timeout_s=600, image="any"), **more)


def launches(server: SkyPlatform) -> int:
    return server.requests.count(("POST", "/jobs/launch"))


def refused(executor: SkyExecutor, wanted: JobSpec) -> str:
    """The one line by which a job is refused."""
    with pytest.raises(BadInput) as raised:
        executor.submit(wanted)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# --- the task ---------------------------------------------------------------------------------------------------------


def test_the_task_holds_what_the_spec_says(server, opened):
    executor = opened(use_spot=True, infra="lambda")
    resources = Resources("B200", 2, cpus=16, memory_gib=128.5, disk_gib=200)
    wanted = spec(env={"A": "1"}, secrets=Secrets({"KEY": SECRET}), resources=resources, image="me/image:1")
    executor.submit(wanted)
    (launched,) = server.tasks
    script = launched.pop("run")
    assert launched == {
        "name": "demo.v1--a--1",
        "resources": {
            "accelerators": "B200:2",
            "cpus": "16+",
            "memory": "128.5+",
            "disk_size": 200,
            "image_id": "docker:me/image:1",
            "use_spot": True,
            "infra": "lambda",
        },
        "envs": {"A": "1"},
        "secrets": {"KEY": SECRET},
    }
    assert SECRET not in script


def test_a_secret_wins_over_a_variable_of_its_name(server, executor):
    executor.submit(spec(env={"KEY": "plain"}, secrets=Secrets({"KEY": SECRET})))
    assert (server.tasks[0]["envs"], server.tasks[0]["secrets"]) == ({}, {"KEY": SECRET})


def test_characters_that_yaml_takes_for_ends_of_lines_arrive(executor):
    odd = "a\x85b\u2028c\x7fd\ufeffe 🙂 \\ud83d"
    job = executor.submit(spec(sys.executable, "-c", "import os; print(ascii(os.environ['ODD']))", env={"ODD": odd}))
    assert list(executor.logs(job, follow=True)) == [ascii(odd)]


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late_s", "printed"), [(-3, ["on"]), (1, [])], ids=["within", "after"])
def test_a_job_whose_machine_comes_late_has_only_what_is_left_of_its_time(server, executor, late_s, printed):
    wanted = spec(sys.executable, "-c", "import time; print('on', flush=True); time.sleep(600)")
    launched_at = time.time() - wanted.timeout_s - sky.START_ALLOWANCE_S - late_s
    server.launch({"task": sky.task_of(wanted, {}, launched_at), "name": wanted.name})
    (job,) = executor.find("demo.v1")
    assert await_end(executor, job).state is JobState.TIMED_OUT
    assert list(executor.logs(job)) == printed


# --- once -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on_its_way", [False, True])
def test_a_launch_whose_answer_is_lost_is_not_made_again(server, executor, waits, is_on_its_way):
    server.fails_launches = is_on_its_way  # as one that isn't through looks
    server.troubles.extend((None, None, None, None, None, "reset"))
    job = executor.submit(spec())
    assert server.requests[5] == ("POST", "/jobs/launch") and launches(server) == 1
    assert executor.find("demo.v1") == [job] and waits == [0.5]


def test_a_launch_that_fails_leaves_no_pending_job_and_shows_no_secret(server, executor):
    server.fails_launches = True
    with pytest.raises(ExecutorError, match="rsync failed with return code 127") as raised:
        executor.submit(spec(secrets=Secrets({"KEY": SECRET})))
    assert [job.status for job in server.jobs.values()] == ["CANCELLED"] and executor.find("demo.v1") == []
    assert SECRET not in "".join(traceback.format_exception(raised.value))
    server.fails_launches = False
    job = executor.submit(spec())
    assert job.id == "2" and executor.find("demo.v1") == [job] and await_running(executor, job)


def test_a_job_whose_launch_is_not_through_is_half_submitted(server, executor):
    server.fails_launches = True
    wanted = spec()
    with pytest.raises(Exception, match="rsync"):
        server.launch({"task": sky.task_of(wanted, {}, time.time()), "name": wanted.name})
    status = executor.poll(Job("sky", "1", "demo.v1", "a", 1))
    assert status.state is JobState.PENDING and status.half_submitted


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_server_that_is_down_is_one_line_that_says_what_to_do(server, executor, waits):
    server.close()
    with pytest.raises(ExecutorError) as raised:
        executor.submit(spec())
    said = str(raised.value)
    assert said.startswith(f"no SkyPilot API server at {server.url} (") and "\n" not in said
    assert said.endswith("start one with `sky api start`, or set SKYPILOT_API_SERVER_ENDPOINT")
    assert waits == list(services.PAUSES_S)


@pytest.mark.parametrize("endpoint", ["sky.example.com:46580", "ftp://sky"])
def test_an_endpoint_that_is_no_url_is_refused(opened, endpoint):
    with pytest.raises(BadInput, match="must be a URL: write http://HOST:PORT"):
        opened(endpoint)


def test_a_server_that_is_too_old_starts_nothing(server, executor):
    server.api_version = 61
    assert "(API 61), and 0.14.1 (API 62) is the least: pip install 'skypilot>=0.14.1'" in refused(executor, spec())
    assert launches(server) == 0


def test_a_server_without_a_cloud_starts_nothing(server, executor):
    server.clouds = []
    assert "has access to no cloud: set one up and run `sky check`" in refused(executor, spec())
    server.clouds = ["kubernetes"]
    executor.log_in()
    assert launches(server) == 0


@pytest.mark.parametrize(
    ("gpu", "count", "said"),
    [
        ("H1000", 8, "SkyPilot (in its enabled clouds) has no GPU 'H1000': nearest are H100"),
        ("TPU", 1, "has no GPU 'TPU': it has B200, GH200, H100"),
        ("b200", 4, "4 x b200: SkyPilot (in its enabled clouds) has machines with 1, 2 of them"),
    ],
)
def test_an_accelerator_that_no_cloud_has_starts_nothing(server, executor, gpu, count, said):
    assert said in refused(executor, spec(resources=Resources(gpu, count)))
    assert launches(server) == 0


@pytest.mark.parametrize(
    "wanted", [spec(site="a-"), spec(run="a___b"), spec(site="x--y")], ids=["ends", "three", "apart"]
)
def test_a_name_that_skypilot_can_not_hold_is_refused(server, executor, wanted):
    assert "which SkyPilot can't hold or tell apart" in refused(executor, wanted)
    assert server.requests == []


def test_an_image_beside_the_launchs_own_is_refused(server, opened):
    assert "drop it, and name an image by --image" in refused(opened(image_id="ami-1"), spec())
    assert server.requests == []


def test_a_wrong_token_names_the_variable_and_is_not_shown(server, opened):
    server.token = "sky_right"
    said = refused(opened(token="sky_wrong"), spec())
    assert "401" in said and "SKYPILOT_SERVICE_ACCOUNT_TOKEN" in said and "sky_wrong" not in said
    assert opened(token="sky_right").submit(spec()).id == "1"


def test_a_servers_password_is_not_shown(server, opened):
    executor = opened(server.url.replace("//", f"//me:{SECRET}@"))
    server.api_version = 1
    texts = [refused(executor, spec()), executor.describe(spec())]
    assert server.url in texts[0] and not [text for text in texts if SECRET in text or "me:" in text]


@pytest.mark.parametrize("text", ["use_spot", "[1]"])
def test_resources_that_are_no_json_object_are_refused(text, monkeypatch):
    monkeypatch.setenv(sky.RESOURCES_VARIABLE, text)
    with pytest.raises(BadInput, match="must be SkyPilot's resources as a JSON object"):
        SkyExecutor()


def test_several_accelerators_are_all_known_and_asked_for_in_their_order(server, executor):
    wanted = spec(resources=Resources("B200, GH200", 1))
    executor.submit(wanted)
    assert server.tasks[0]["resources"]["accelerators"] == ["B200:1", "GH200:1"]
    assert executor.price(wanted).usd_per_hour == 6.99
    assert "no GPU 'H1000'" in refused(executor, spec(site="b", resources=Resources("B200, H1000", 1)))


def test_a_place_goes_into_the_task(server, opened):
    executor = opened(infra="gcp", use_spot=True)
    places = Resources(region="us-east-1"), Resources(cloud="aws", nonpreemptible=True), Resources()
    for site, place in zip("abc", places, strict=True):
        executor.submit(spec(site=site, resources=place))
    asked = [(task["resources"]["infra"], task["resources"]["use_spot"]) for task in server.tasks]
    assert asked == [("*/us-east-1", True), ("aws/*", False), ("gcp", True)]


# --- states and prices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "state"),
    [
        *((each, JobState.PENDING) for each in ("PENDING", "STARTING", "RECOVERING")),
        *((each, JobState.RUNNING) for each in ("RUNNING", "WINDING_DOWN", "CANCELLING", "OF_TOMORROW")),
        *((f"FAILED{each}", JobState.FAILED) for each in ("", "_SETUP", "_PRECHECKS", "_NO_RESOURCE", "_CONTROLLER")),
        ("SUCCEEDED", JobState.SUCCEEDED),
        ("CANCELLED", JobState.CANCELLED),
    ],
)
def test_each_of_skypilots_states_has_ours(told, state):
    assert sky.status_of({"status": told, "failure_reason": None}).state is state


def test_a_job_on_its_way_out_is_running_until_its_machine_is_gone(server, executor):
    job = executor.submit(spec())
    await_running(executor, job)
    server.jobs[1].is_cancelled = True
    assert executor.poll(job).state is JobState.RUNNING


H100 = Resources("H100", 8)


@pytest.mark.parametrize(
    ("resources", "given", "usd", "said"),
    [
        (H100, {}, 31.92, r"catalog at http.*, from \$31.92 on: the dearest"),
        (H100, {"max_hourly_cost": 25}, 25.0, "max_hourly_cost"),
        (H100, {"use_spot": True}, None, "no price of it"),
        (H100, {"infra": "aws/us-east-1"}, None, "no price of it"),
        (Resources(), {}, None, "without a GPU"),
    ],
    ids=["catalog", "bound", "spot", "elsewhere", "cpu"],
)
def test_a_price_is_the_servers_and_never_guessed(opened, resources, given, usd, said):
    price = opened(**given).price(spec(resources=resources))
    assert price.usd_per_hour == usd and re.search(said, price.source) and price.overrun_s >= 600


@pytest.mark.parametrize(("gpu", "usd"), [("H100", 31.92), ("H1000", None)])
@pytest.mark.parametrize("lacking", [{"has_catalog": False}, {"clouds": []}], ids=["catalog", "clouds"])
def test_without_a_catalog_or_a_cloud_the_shipped_table_serves_marked_stale(server, executor, gpu, usd, lacking):
    vars(server).update(lacking)
    price = executor.price(spec(resources=Resources(gpu, 8)))
    assert price.usd_per_hour == usd and re.match(r"stale, .* \(2026-11-26\)", price.source)
    assert "max_hourly_cost" in price.unbounded


def test_a_price_and_a_description_wait_for_no_server(server, executor, waits):
    server.close()
    wanted = spec(resources=H100, secrets=Secrets({"KEY": SECRET}))
    assert executor.price(wanted).source.startswith("stale")
    described = executor.describe(wanted)
    assert "secrets  KEY" in described and '"accelerators": "H100:8"' in described and SECRET not in described
    assert waits == []


def test_machines_of_ones_own_cost_nothing(opened, monkeypatch):
    own = ["Kubernetes", None, "H100", 8.0, None, None, None, None, None, "my-cluster"]
    monkeypatch.setitem(CATALOG, "H100", [*CATALOG["H100"], own])
    assert opened(infra="k8s/my-cluster").price(spec(resources=H100)).usd_per_hour == 0.0


def test_the_account_tells_users_and_one_machines_loopback_from_anothers(server, opened, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert opened().account() == f"@{server.url} on here"
    server.user = {"id": "1", "name": "ann"}
    assert opened().account() == f"ann@{server.url} on here"


def test_a_supervisor_elsewhere_is_given_the_server_unless_only_this_machine_reaches_it(opened):
    far = opened(endpoint="https://sky.example", token="sky-token-0123456789")
    assert far.credentials() == {
        "SKYPILOT_API_SERVER_ENDPOINT": "https://sky.example",
        "SKYPILOT_SERVICE_ACCOUNT_TOKEN": "sky-token-0123456789",
    }
    with pytest.raises(BadInput, match="is this machine's alone, so nobody elsewhere can watch its jobs"):
        opened(endpoint="http://127.0.0.1:1").credentials()


def test_an_error_shows_nothing_of_the_request_that_it_answers(server, executor):
    with closing(sky_api.SkyApi(server.url)) as client, pytest.raises(BadInput) as raised:
        client.launch({"name": SECRET})
    assert "body.task: Field required" in str(raised.value) and SECRET not in str(raised.value)
