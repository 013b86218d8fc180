"""The loopback of SkyPilot beside its real API server: answers that were recorded, and a server that is there now.

`SKY_API_SERVER=http://127.0.0.1:46580 pytest tests/executors/test_sky_recorded.py` asks a real one; it starts nothing.
"""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Job, JobSpec, JobState, Resources
from composer_prime.executors.sky import FIELDS, SkyExecutor, command_lines, status_of
from composer_prime.executors.sky_api import SkyApi
from tests.executors.loopback_sky import SkyPlatform
from tests.executors.loopback_sky_routes import recorded
from tests.servers.in_thread import serving_app

TASK = "name: x\nrun: exit 3\nenvs: {}\nsecrets: {}\n"
ASKED: dict[str, tuple[str, Any]] = {
    "enabled_clouds": ("/enabled_clouds", None),
    "queue": ("/jobs/queue/v2", {"fields": [*FIELDS, "submitted_at"]}),
    "launch": ("/jobs/launch", {"task": TASK, "name": "x"}),
    "launch_refused": ("/jobs/launch", {"task": "name: x\nrun: 3\n", "name": "x"}),
    "list_accelerators": ("/list_accelerators", {"clouds": ["lambda"], "require_price": False}),
    "list_accelerators_unavailable": ("/list_accelerators", {"clouds": ["lambda"], "require_price": False}),
    "cancel": ("/jobs/cancel", {"job_ids": [77]}),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SkyPlatform]:
    with closing(SkyPlatform(tmp_path / "server")) as loopback:
        yield loopback


def parsed(value: Any) -> Any:
    """An answer with the JSON in its strings read."""
    if isinstance(value, dict):
        return {name: parsed(each) for name, each in value.items()}
    return json.loads(value) if isinstance(value, str) and value[:1] in ("{", "[") else value


def differences(real: Any, ours: Any, where: str = "") -> list[str]:
    """Where two answers differ in shape: keys and types. What is null in one of them may be anything."""
    if real is None or ours is None:
        return []
    if isinstance(real, dict) and isinstance(ours, dict):
        keys = [f"{where}.{key} is in one alone" for key in real.keys() ^ ours.keys()]
        return keys + [
            line for key in real.keys() & ours for line in differences(real[key], ours[key], f"{where}.{key}")
        ]
    if isinstance(real, list) and isinstance(ours, list):
        return [line for one, other in zip(real, ours, strict=False) for line in differences(one, other, f"{where}[]")]
    alike = (int, float) if isinstance(real, int | float) else type(real)
    return [] if isinstance(ours, alike) else [f"{where}: {real!r} and {ours!r}"]


@pytest.mark.parametrize("name", ASKED)
def test_the_loopback_answers_in_the_real_servers_shapes(server: SkyPlatform, name: str) -> None:
    path, body = ASKED[name]
    server.launch({"task": TASK, "name": "x"})
    server.jobs[1].machines[0].wait()
    server.has_catalog = name != "list_accelerators_unavailable"
    answer = httpx.request("GET" if body is None else "POST", f"{server.url}{path}", json=body)
    result = httpx.get(f"{server.url}/api/get", params={"request_id": answer.headers["x-skypilot-request-id"]})
    real = recorded(name)
    assert (answer.status_code, answer.json()) == (real["post_status"], real["post_body"])
    assert result.status_code == real["get_status"]
    result_of = parsed(real["get"])
    if name == "queue":  # the record that has all its times
        jobs = parsed(result_of["return_value"])["jobs"]
        result_of["return_value"]["jobs"] = [next(job for job in jobs if job["status"] == "FAILED")]
        result_of["return_value"]["status_counts"] = {"FAILED": 1}
    assert differences(result_of, parsed(result.json())) == []


def test_a_difference_of_shape_would_be_seen() -> None:
    real = {"a": 1, "b": [{"c": "x"}], "d": None}
    assert differences(real, {"a": 1.5, "b": [{"c": "y"}], "d": 3}) == []
    other = {"a": "1", "b": [{"e": "y"}], "d": 3}
    assert sorted(differences(real, other)) == [".a: 1 and '1'", ".b[].c is in one alone", ".b[].e is in one alone"]


def test_the_real_servers_records_are_read() -> None:
    told = json.loads(recorded("queue")["get"]["return_value"])
    statuses = {job["job_id"]: status_of(job) for job in told["jobs"]}
    assert (statuses[2].state, statuses[2].exit_code) == (JobState.FAILED, 3)
    assert (statuses[2].started_at, statuses[2].ended_at) == (1795669200.5, 1795669237.5)
    assert (statuses[3].state, statuses[3].exit_code, statuses[3].started_at) == (JobState.FAILED, None, None)
    assert statuses[3].message == (
        "FAILED_PRECHECKS: [sky.exceptions.NoCloudAccessError] Cloud access is not set up. Run: sky check"
    )
    assert statuses[1].state is JobState.CANCELLED


def lines_of(name: str) -> list[str]:
    return [line for _, line in command_lines(iter([recorded(name)["text"].encode()]))]


def test_the_real_servers_log_is_read() -> None:
    assert (lines_of("logs_failed"), lines_of("logs_unknown")) == (["hello"], [])


def test_the_log_of_skypilots_own_program_on_a_machine_is_read() -> None:
    lines = lines_of("machine_log")
    assert lines[:4] == ["plain True True", "err", "", "    indented  "]
    assert lines[4:] == ["é 漢 🙂\u2028\x85 end", "a��b", "cr\rcr2", "line 0", "line 1", "last without end"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("launch_refused", "Invalid task YAML: 3 is not of type 'string'. Check problematic field(s): $.run"),
        ("launch_unreadable", "body.task: Field required"),
        ("client_too_old", "Your SkyPilot client version is too old"),
    ],
)
def test_the_real_servers_refusals_are_one_line(name: str, said: str) -> None:
    real = recorded(name)

    async def post(request: Any) -> JSONResponse:
        return JSONResponse(real.get("body"), real.get("status", 200), {"x-skypilot-request-id": "r"})

    async def get(request: Any) -> JSONResponse:
        return JSONResponse(real["get"], real["get_status"])

    app = Starlette(routes=[Route("/jobs/launch", post, methods=["POST"]), Route("/api/get", get)])
    with (
        serving_app(app) as port,
        closing(SkyApi(f"http://127.0.0.1:{port}")) as api,
        pytest.raises(BadInput) as raised,
    ):
        api.launch({})
    assert said in str(raised.value) and "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


# --- a real server that is there now ----------------------------------------------------------------------------------

real_server = pytest.mark.skipif(
    "SKY_API_SERVER" not in os.environ, reason="needs SkyPilot's API server: SKY_API_SERVER"
)


@pytest.fixture
def real_api() -> Iterator[SkyApi]:
    with closing(SkyApi(os.environ["SKY_API_SERVER"])) as opened:
        yield opened


@pytest.fixture
def real() -> Iterator[SkyExecutor]:
    with closing(SkyExecutor(os.environ["SKY_API_SERVER"], resources={})) as opened:
        yield opened


@real_server
def test_a_real_server_is_ready_and_its_queue_is_read(real: SkyExecutor, real_api: SkyApi) -> None:
    real_api.check_ready()
    for record in real_api.ask("/jobs/queue/v2", {"fields": list(FIELDS)})["jobs"]:
        print(record["job_name"], status_of(record))
    print("clouds:", real_api.ask("/enabled_clouds"))
    assert real.find("nobody-started-this") == []
    with pytest.raises(ExecutorError, match="has no job 999999999"):
        real.poll(Job("sky", "999999999", "r", "a", 1))


@real_server
def test_a_real_server_without_a_cloud_refuses_a_launch_and_starts_nothing(real: SkyExecutor, real_api: SkyApi) -> None:
    if real_api.ask("/enabled_clouds"):
        pytest.skip("this server has a cloud, on which a launch would start something")
    spec = JobSpec("real-server", "a", 1, ("true",), 60)
    with pytest.raises(BadInput, match="has access to no cloud") as raised:
        real.submit(spec)
    print("refused:", raised.value)
    assert real.find("real-server") == []


@real_server
def test_a_real_server_tells_a_price_or_the_shipped_table_does(real: SkyExecutor) -> None:
    price = real.price(JobSpec("r", "a", 1, ("true",), 60, resources=Resources("H100", 8)))
    print("price:", price)
    assert price.usd_per_hour and ("catalog at" in price.source or price.source.startswith("stale"))
