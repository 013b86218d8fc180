"""`ps`, `logs` and `cancel` on a machine that has the URI of a bucket, a login, and nothing else of the launch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from composer_prime.executors.base import Job
from tests.architecture import REPOSITORY
from tests.executors.jobs import FOREVER, PATIENCE_S, Stage
from tests.executors.platforms import LoopbackPlatform
from tests.executors.registry import loopback
from tests.executors.staged import StagedFleet, staged_plan

LOGINS = {
    "modal": ("MODAL_SERVER_URL", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
    "hf-jobs": ("HF_ENDPOINT", "HF_TOKEN"),
    "sky": ("SKYPILOT_API_SERVER_ENDPOINT",),
}
"""What says where the loopback is and who asks; the rest of a launcher's environment stays behind."""

ANOTHER_MACHINE = """
import json, socket, sys
socket.gethostname = lambda: "another-machine"
from composer_prime.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["composer-prime", *arguments]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code, flush=True)
"""


@pytest.fixture(params=[pytest.param(name, id=name) for name in LOGINS])
def platform(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopbackPlatform]:
    with closing(loopback(request.param, tmp_path / "platform")) as opened:
        yield opened


def launch(platform: LoopbackPlatform, stage: Stage) -> tuple[str, Job]:
    """The URI of a launch's bucket, and its one job, which runs."""
    with closing(
        StagedFleet(stage.folder, f"say('hello'); mark('up'); {FOREVER}", lambda on: platform.executor())
    ) as fleet:
        job = fleet.start(staged_plan(platform.launch_option(), "a"), "a", 1, 600)
    stage.await_mark("up")
    return fleet.book.store.uri, job


def elsewhere(platform: LoopbackPlatform, home: Path, *commands: tuple[str, ...]) -> list[str]:
    """What each command prints in one fresh process of another folder and home, which all have to end well."""
    home.mkdir()
    login = {name: value for name, value in platform.environment().items() if name in LOGINS[platform.name]}
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_MACHINE, json.dumps(commands)],
        cwd=home,
        env={"HOME": str(home), "PATH": os.defpath, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **login},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    *printed, rest = done.stdout.split("ended with 0\n")
    assert (len(printed), rest) == (len(commands), ""), (done.stdout, done.stderr)
    return printed


@pytest.mark.skipif(sys.platform != "linux", reason="the loopbacks find a job's processes in /proc")
def test_ps_logs_and_cancel_need_the_buckets_uri_and_the_platforms_login_alone(
    platform: LoopbackPlatform, tmp_path: Path
) -> None:
    uri, job = launch(platform, Stage(tmp_path / "stage", "elsewhere"))
    commands = ("ps", uri, "--json"), ("logs", uri), ("cancel", uri), ("ps", uri, "--json")
    before, log, ended, after = elsewhere(platform, tmp_path / "another-home", *commands)
    assert [json.loads(text)["state"] for text in (before, after)] == ["running", "cancelled"]
    assert log == "hello\n"
    assert "a attempt 1: cancelled\nnothing of " in ended
    assert platform.pids(job) == []
