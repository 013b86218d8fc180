"""The program in a Modal container: one attempt of one site, as a process group of its own.

Modal copies this file, alone, into any image that has a Python: standard library only, and `modal`, which every
container has. executor.Records has the rules by which a job is claimed.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from typing import Any

import modal

__package__ = ""  # of a module in a package Modal's client would send all of that
TIMEOUT_GRACE_S, PREEMPTION_GRACE_S = 40.0, 20.0
"""Seconds that a command gets to end by itself; Modal kills a container 30 s after it said that it takes it back."""
DRAIN_S = 5.0
NOT_FOUND = 127
"""A shell's exit code for a command that can't be started."""


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Run `job["command"]` once, whatever Modal does, and say how it ended.

    job      name, records (a Dict's name), command, env, timeout_s
    returns  state (a JobState), message, and where the command ran exit_code and ended_at (Unix seconds)
    """
    try:
        records = modal.Dict.from_name(job["records"])
        if end := _reason_not_to_run(job["name"], records, modal.current_function_call_id() or ""):
            return end
    except Exception as error:
        # A modal exception that travels back would read as one of the caller's own connection.
        return {"state": "failed", "message": f"broken: {type(error).__name__}: {error}"}
    try:
        return {**_run(job["command"], job["env"], job["timeout_s"]), "ended_at": time.time()}
    except KeyboardInterrupt:
        # So that nobody needs to wait for the next container to say it.
        _taken_back(records, job["name"])
        raise


def _reason_not_to_run(name: str, records: Any, call: str) -> dict[str, Any]:
    """Empty for the first container of the job's one call; the same container never asks twice."""
    if first(records, f"{name}/call", call) != call:
        return {"state": "cancelled", "message": "another call has this job"}
    mine = {"task": os.environ.get("MODAL_TASK_ID", ""), "started_at": time.time()}
    if first(records, f"{name}/start", mine) != mine:
        # Modal starts an interrupted input again. Whether that is worth its price is the fleet's to say.
        return _taken_back(records, name)
    return {}


def _taken_back(records: Any, name: str) -> dict[str, Any]:
    """The end of the job, as the first has it who saw it; the next container, where the machine vanished."""
    task = records.get(f"{name}/start")["task"]
    end = {"state": "preempted", "message": f"container {task} was taken back", "ended_at": time.time()}
    return first(records, f"{name}/end", end)


def first(records: Any, key: str, value: Any) -> Any:
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
        message = f"{command[0]}: {error.strerror}"
        print(message, flush=True)
        return {"state": "failed", "exit_code": NOT_FOUND, "message": message}
    # A child that outlives the command holds the pipe open: the command's end is what counts.
    pump = threading.Thread(target=_pass_on, args=(process.stdout,), daemon=True)
    pump.start()
    try:
        code = process.wait(timeout_s)
        return {"state": "failed" if code else "succeeded", "exit_code": code, "message": f"exit code {code}"}
    except BaseException as error:
        timed_out = isinstance(error, subprocess.TimeoutExpired)
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT_GRACE_S if timed_out else PREEMPTION_GRACE_S)
        if not timed_out:
            raise
        return {"state": "timed-out", "message": f"ran past {timeout_s} s"}
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        pump.join(DRAIN_S)


def _pass_on(output: Any) -> None:
    # Through sys.stdout, line by line: Modal assigns what it prints to the call.
    with output:
        for line in output:
            print(line.decode(errors="replace"), end="", flush=True)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
