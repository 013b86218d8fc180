"""What runs in a Modal container: one attempt of one site, as a process group of its own.

Modal copies this file, alone, into any image that has a Python: standard library only, and `modal`, which every
container has. The rules by which a job is claimed are in records.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import modal

__package__ = ""  # of a module in a package Modal's client would send all of that
TIMEOUT_GRACE_S, PREEMPTION_GRACE_S = 40.0, 20.0
"""What a command gets to end by itself; Modal kills a container 30 s after it said that it takes it back."""
DRAIN_S = 5.0
NOT_FOUND = 127
"""What a shell returns for a command that can't be started."""


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Run `job["command"]` once, whatever Modal does, and say how it ended.

    job      name, records (a Dict's name), command, env, timeout_s
    returns  outcome ("exited", "timed-out", "double", "preempted", "broken"), exit_code, started_at, ended_at (Unix
             seconds), message
    """
    try:
        records = modal.Dict.from_name(job["records"])
        if refusal := _reason_not_to_run(job["name"], records, modal.current_function_call_id() or ""):
            return refusal
    except Exception as error:
        # A modal exception that travels back would read as one of the caller's own connection.
        return {"outcome": "broken", "message": f"{type(error).__name__}: {error}"}
    started_at = time.time()
    try:
        answer = _run(job["command"], job["env"], job["timeout_s"])
    except KeyboardInterrupt:
        # So that nobody needs to wait for the next container to say it.
        _taken_back(records, job["name"])
        raise
    return {**answer, "started_at": started_at, "ended_at": time.time()}


def _reason_not_to_run(name: str, records: Any, call: str) -> dict[str, Any]:
    """Empty for the first container of the job's one call; the same container never asks twice."""
    if _first(records, f"{name}/call", call) != call:
        return {"outcome": "double", "message": "another call has this job"}
    mine = {"task": os.environ.get("MODAL_TASK_ID", ""), "started_at": time.time()}
    if _first(records, f"{name}/start", mine) != mine:
        # Modal starts an interrupted input again. Whether that is worth its price is the fleet's to say.
        return _taken_back(records, name)
    return {}


def _taken_back(records: Any, name: str) -> dict[str, Any]:
    """The end of the job, as the first has it who saw it; the next container, where the machine vanished."""
    start = records.get(f"{name}/start")
    end = {"outcome": "preempted", "message": f"container {start['task']} was taken back", "ended_at": time.time()}
    return _first(records, f"{name}/end", {**end, "started_at": start["started_at"]})


def _first(records: Any, key: str, value: Any) -> Any:
    """The value that `key` has for good: ours if we were first. What `put` returns is wrong when it was repeated."""
    records.put(key, value, skip_if_exists=True)
    return records.get(key)


def _run(command: list[str], env: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """How the command ended. Nothing of its group lives on, also when we are interrupted."""
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", flush=True)
        return {"outcome": "exited", "exit_code": NOT_FOUND, "message": f"{command[0]}: {error.strerror}"}
    # A child that outlives the command holds the pipe open: the command's end is what counts.
    pump = threading.Thread(target=_pass_on, args=(process.stdout,), daemon=True)
    pump.start()
    try:
        return {"outcome": "exited", "exit_code": process.wait(timeout_s)}
    except BaseException as error:
        timed_out = isinstance(error, subprocess.TimeoutExpired)
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT_GRACE_S if timed_out else PREEMPTION_GRACE_S)
        if not timed_out:
            raise
        return {"outcome": "timed-out", "message": f"ran past {timeout_s} s"}
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        pump.join(DRAIN_S)


def _pass_on(output: Any) -> None:
    # Through sys.stdout, line by line: Modal assigns what it prints to the call.
    with output:
        for line in output:
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
