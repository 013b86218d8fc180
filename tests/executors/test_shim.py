"""The keeper of a job: what it leaves in its folder, and whom it doesn't take for itself."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_prime import redaction
from composer_prime.executors import shim
from composer_prime.executors.local import SHIM_COMMAND, read_reply, shim_input
from tests.executors.jobs import wait_until
from tests.patience import PATIENCE_S

JOB = "run/a/1"


def ask(root: Path, verb: str, **arguments: object) -> dict[str, Any]:
    """The shim's reply to a request, as a machine that has nothing of ours would give it."""
    done = subprocess.run(
        [sys.executable, *SHIM_COMMAND],
        input=shim_input({"verb": verb, "root": str(root), "job": JOB, **arguments}),
        capture_output=True,
        timeout=PATIENCE_S,
    )
    return read_reply(done.stdout, done.stderr)


def start(root: Path, code: str, **more: object) -> Path:
    """Start a job that runs `code`; its folder."""
    given: dict[str, object] = {"env": {}, "defaults": {}, "secrets": {}, "caches": {}}
    command = [sys.executable, "-c", code]
    request = {"command": command, "timeout_s": 60, "grace_s": 0.5, **given, **more}
    assert ask(root, "start", request=request) == {"answer": None}
    return root / "jobs" / JOB


def state_of(root: Path) -> dict[str, Any]:
    return shim.status(str(root), JOB)


def ended(root: Path) -> dict[str, Any]:
    wait_until(lambda: state_of(root)["state"] != "running", "end")
    return state_of(root)


def await_log(folder: Path, text: str) -> None:
    wait_until(lambda: text in (folder / "log").read_text(), text)


@pytest.mark.parametrize("copied", [Path(shim.__file__), Path(redaction.__file__)], ids=lambda path: path.name)
def test_it_needs_nothing_but_the_standard_library_and_reads_as_python_39(copied: Path) -> None:
    tree = ast.parse(copied.read_text(encoding="utf-8"), feature_version=(3, 9))
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.split(".")[0] for name in names - {redaction.__name__}} <= {*sys.stdlib_module_names, "detect_secrets"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Match)]


def test_started_from_standard_input_alone_it_runs_a_job_to_its_end(tmp_path: Path) -> None:
    start(tmp_path, "print('hi'); raise SystemExit(5)")
    state = ended(tmp_path)
    assert (state["state"], state["exit_code"]) == ("failed", 5)
    assert ask(tmp_path, "log", offset=0, wait_s=60.0) == {"answer": ["hi\n", False]}
    assert ask(tmp_path, "log", offset=1, wait_s=0.0) == {"answer": ["i\n", False]}
    assert ask(tmp_path, "status") == {"answer": state}


def test_a_folder_without_a_job_is_said_so(tmp_path: Path) -> None:
    assert "no job run/a/1" in ask(tmp_path, "status")["unknown"]


def test_a_reused_pid_is_not_taken_for_the_keeper(tmp_path: Path) -> None:
    folder = start(tmp_path, "import time; time.sleep(600)")
    keeper = state_of(tmp_path)["keeper"]
    shim._kill([keeper, *shim.job_processes(str(folder), keeper)])
    wait_until(lambda: shim.process_start(keeper) is None, "keeper gone")
    state = shim.read_state(str(folder))
    assert state is not None
    shim._write_state(str(folder), {**state, "keeper": os.getpid()})  # our pid, its start
    assert state_of(tmp_path)["state"] == "preempted"


def test_a_killed_keepers_command_is_gone_too(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    folder = start(tmp_path, f"{child}; print('up', flush=True); time.sleep(600)")
    await_log(folder, "up\n")
    keeper = state_of(tmp_path)["keeper"]
    shim._kill([keeper])
    wait_until(lambda: shim.process_start(keeper) is None, "keeper gone")
    assert state_of(tmp_path)["state"] == "preempted"
    wait_until(lambda: shim.job_processes(str(folder)) == [], "no process left")


def test_a_machine_that_shuts_down_is_a_preemption(tmp_path: Path) -> None:
    folder = start(tmp_path, "import time; print('up', flush=True); time.sleep(600)")
    await_log(folder, "up\n")
    os.kill(state_of(tmp_path)["keeper"], 15)
    assert ended(tmp_path)["state"] == "preempted"


@pytest.mark.parametrize("ends", ["cancel", "time"])
def test_a_command_may_end_by_itself_in_its_grace(tmp_path: Path, ends: str) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("up", flush=True)
time.sleep(600)
"""
    folder = start(tmp_path, code, timeout_s=60 if ends == "cancel" else 5, grace_s=30)
    await_log(folder, "up\n")
    if ends == "cancel":
        shim.cancel(str(tmp_path), JOB, PATIENCE_S)
    assert ended(tmp_path)["state"] == ("cancelled" if ends == "cancel" else "timed-out")
    assert (folder / "log").read_text() == "up\nsaved\n"


def test_a_cancel_that_is_not_confirmed_in_its_time_says_what_still_runs(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    await_log(start(tmp_path, code, grace_s=600), "up\n")
    keeper = state_of(tmp_path)["keeper"]
    assert f"still runs as pid {keeper}" in ask(tmp_path, "cancel", wait_s=0.1)["error"]
    shim._kill([keeper])
    wait_until(lambda: state_of(tmp_path)["state"] == "preempted", "gone")


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    child = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    folder = start(tmp_path, f"import subprocess, sys; subprocess.Popen({child}, start_new_session=True)")
    assert ended(tmp_path)["exit_code"] == 0
    assert shim.job_processes(str(folder)) == []
