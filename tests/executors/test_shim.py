"""The keeper of a job: what it leaves in its folder, and whom it doesn't take for itself."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime import redaction
from composer_prime.executors.local import shim
from tests.executors.jobs import wait_until
from tests.patience import PATIENCE_S

SHIM = Path(shim.__file__)


def call(*arguments: str, request: dict | None = None) -> subprocess.CompletedProcess[str]:
    """Run the file as a machine that has nothing of ours would."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(SHIM), *arguments],
        input="" if request is None else json.dumps(request),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def request(code: str, **more: object) -> dict:
    return {"command": [sys.executable, "-c", code], "timeout_s": 60, "grace_s": 0.5, **more}


def ended(folder: Path) -> dict:
    wait_until(lambda: (shim.status(str(folder)) or {}).get("state") == "ended", "end")
    found = shim.status(str(folder))
    assert found is not None
    return found


@pytest.mark.parametrize("copied", [SHIM, Path(redaction.__file__)], ids=lambda path: path.name)
def test_it_imports_nothing_but_the_standard_library_and_reads_as_python_39(copied: Path) -> None:
    tree = ast.parse(copied.read_text(encoding="utf-8"), feature_version=(3, 9))
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.split(".")[0] for name in names - {redaction.__name__}} <= set(sys.stdlib_module_names)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Match)]


def test_started_from_its_file_alone_it_runs_a_job_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    answer = json.loads(call("start", str(folder), request=request("print('hi'); raise SystemExit(5)")).stdout)
    assert answer["new"] is True
    state = ended(folder)
    assert (state["reason"], state["exit_code"]) == ("exited", 5)
    assert call("log", str(folder), "--follow").stdout == "hi\n"
    assert json.loads(call("status", str(folder)).stdout)["exit_code"] == 5
    assert [each["folder"] for each in json.loads(call("list", str(tmp_path)).stdout)] == [str(folder)]


def test_a_folder_without_a_job_is_said_so(tmp_path: Path) -> None:
    answer = call("status", str(tmp_path))
    assert answer.returncode == 1 and "no job" in answer.stderr


def test_secrets_are_in_no_file_of_the_job(tmp_path: Path) -> None:
    secret = "very-secret-value"
    code = "import os; print(os.environ['S']); raise SystemExit(os.environ['S'])"
    call("start", str(tmp_path), request=request(code, secrets={"S": secret}))
    ended(tmp_path)
    assert all(secret not in path.read_text() for path in tmp_path.iterdir())
    assert (tmp_path / "log").read_text() == f"{redaction.HIDDEN}\n" * 2


def test_an_access_key_s_id_stays_in_the_log(tmp_path: Path) -> None:
    call("start", str(tmp_path), request=request("print('composer-prime')", secrets={"AWS_ACCESS_KEY_ID": "composer"}))
    ended(tmp_path)
    assert (tmp_path / "log").read_text() == "composer-prime\n"


def test_a_reused_pid_is_not_taken_for_the_keeper(tmp_path: Path) -> None:
    call("start", str(tmp_path), request=request("import time; time.sleep(600)"))
    state = shim.read_state(str(tmp_path))
    assert state is not None and state["state"] in ("pending", "running")
    keeper = state["keeper"]
    wait_until(lambda: (shim.status(str(tmp_path)) or {})["state"] == "running", "running")
    shim._kill([keeper, *shim.family(keeper)])
    wait_until(lambda: shim.process_start(keeper) is None, "keeper gone")
    state = shim.read_state(str(tmp_path))
    assert state is not None
    shim._write_state(str(tmp_path), {**state, "keeper": os.getpid()})  # our pid, its start
    assert (shim.status(str(tmp_path)) or {})["reason"] == "preempted"


def test_a_killed_keepers_command_is_gone_too(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    call("start", str(tmp_path), request=request(f"{child}; print('up', flush=True); time.sleep(600)"))
    wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "up\n", "up")
    state = shim.read_state(str(tmp_path))
    assert state is not None
    shim._kill([state["keeper"]])
    wait_until(lambda: shim.process_start(state["keeper"]) is None, "keeper gone")
    assert (shim.status(str(tmp_path)) or {})["reason"] == "preempted"
    wait_until(lambda: shim.job_processes(str(tmp_path)) == [], "no process left")


def test_a_machine_that_shuts_down_is_a_preemption(tmp_path: Path) -> None:
    call("start", str(tmp_path), request=request("import time; print('up', flush=True); time.sleep(600)"))
    wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "up\n", "up")
    state = shim.read_state(str(tmp_path))
    assert state is not None
    os.kill(state["keeper"], 15)
    assert ended(tmp_path)["reason"] == "preempted"


@pytest.mark.parametrize("ends", ["cancel", "time"])
def test_a_command_may_end_by_itself_in_its_grace(tmp_path: Path, ends: str) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("up", flush=True)
time.sleep(600)
"""
    call("start", str(tmp_path), request=request(code, timeout_s=60 if ends == "cancel" else 5, grace_s=30))
    wait_until(lambda: (tmp_path / "log").exists() and "up\n" in (tmp_path / "log").read_text(), "up")
    if ends == "cancel":
        shim.cancel(str(tmp_path))
    state = ended(tmp_path)
    assert (state["reason"], state["exit_code"]) == ("cancelled" if ends == "cancel" else "timed-out", 0)
    assert (tmp_path / "log").read_text() == "up\nsaved\n"


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    child = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    code = f"import subprocess, sys; subprocess.Popen({child}, start_new_session=True)"
    call("start", str(tmp_path), request=request(code))
    assert ended(tmp_path)["exit_code"] == 0
    assert shim.job_processes(str(tmp_path)) == []
