"""Runs one command in a job's folder, apart from whoever started it, and writes down how it goes and how it ended.

Standard library and redaction.py only, Python 3.9 or later: both are sent to hosts that have nothing of ours. A process
answers one request (`main`); a keeper process owns the job's command. Under the `root` that a request names:

    jobs/RUN/SITE/ATTEMPT/   a job's folder
        lock         held while the job is started, so that of several starters one starts it
        state.json   replaced whole: the job's state and times, whose it is, the keeper's pid and when that began
        cancel       its being there asks the keeper to end the command
        log          both outputs in the order they came, secrets cut out
        keeper.log   what went wrong in the keeper itself
    jobs/RUN/SITE/work       where all attempts of a site run
    venv/                    an environment whose programs jobs find first, where there is one

Secrets pass from the request to the command's environment through memory alone. A job whose keeper is gone without
having written an end was preempted: its machine was taken, or restarted. Hosts may share the folder (a home on NFS,
say): each answers for its own jobs alone, since another's pids mean nothing here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time

# A host is asked about a job by one process a question: what only keepers need is imported where they need it.

HOST = os.uname().nodename
JOB_VARIABLE = "COMPOSER_PRIME_JOB"
"""Names the job's folder in the environment of all its processes."""
GRACE_S = 40.0
"""Seconds from SIGTERM to SIGKILL, for a command that is told to end: a site's trainer writes a checkpoint."""
CONFIRM_S = 20.0
"""Seconds beyond the grace in which an end must be confirmed."""
LOOK_S = 0.05
NOT_STARTED = 127
REPLY = "composer-prime-reply "
"""Begins the line that holds a reply: login scripts print too."""
CHUNK_BYTES = 1 << 20
"""The most of a log that one reply holds."""
_SET_SUBREAPER = 36  # prctl's


class Refusal(Exception):
    """A request that can't be met: whether it is "unknown", "refused" or an "error", and why."""


# --- processes -------------------------------------------------------------------------------------------------------


def process_start(pid: int) -> str | None:
    """Tells a process from a later one of the same pid; None when there is none, or a dead one not yet reaped."""
    if not os.path.exists("/proc/self/stat"):
        import subprocess

        asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], stdout=subprocess.PIPE)
        return asked.stdout.decode().strip() or None
    fields = _read_all("stat", [str(pid)]).get(pid, b"").rpartition(b")")[2].split()
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}:{fields[19].decode()}" if fields and fields[0] != b"Z" else None


def job_processes(folder: str, keeper: int | None = None) -> list[int]:
    """A job's live processes, where the system has /proc: its keeper's descendants, and those that carry its mark."""
    mark = f"{JOB_VARIABLE}={folder}".encode()
    pids = os.listdir("/proc") if os.path.exists("/proc/self/stat") else []
    found = [pid for pid, variables in _read_all("environ", pids).items() if mark in variables.split(b"\0")]
    stats = {pid: stat.rpartition(b")")[2].split() for pid, stat in _read_all("stat", pids).items()}
    level = [keeper]
    while level:
        level = [pid for pid, fields in stats.items() if fields[0] != b"Z" and int(fields[1]) in level]
        found += level
    return found


def _read_all(name: str, pids: list[str]) -> dict[int, bytes]:
    """The files `name` in /proc of the processes that are there and let them be read."""
    found = {}
    for pid in filter(str.isdigit, pids):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            found[int(pid)] = file.read()
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- requests --------------------------------------------------------------------------------------------------------


def start(root: str, job: str, request: dict) -> None:
    """Start a job (RUN/SITE/ATTEMPT) apart from this process, unless one was started in its folder before.

    The keeper holds the lock until its state is on disk, so a starter killed half-way leaves a job or none.
    """
    os.makedirs(root, mode=0o700, exist_ok=True)
    for name, cache in request["caches"].items():
        try:
            os.makedirs(cache, exist_ok=True)
        except OSError as error:
            why = f"cache {name} ({cache}) can't be made: {error.strerror}: give a folder that you may write"
            raise Refusal("refused", why) from None
    programs, path = os.path.join(root, "venv", "bin"), os.environ.get("PATH", os.defpath)
    request["env"].setdefault("PATH", programs + os.pathsep + path if os.path.isdir(programs) else path)
    folder = _folder(root, job)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read_state(folder) is not None:
            return
        if os.fork() == 0:
            try:
                _keep(folder, request, lock)
            except BaseException:
                import traceback

                traceback.print_exc()  # by then in keeper.log
            finally:
                os._exit(0)
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the keeper has written its state, or died
    if read_state(folder) is None:
        raise Refusal("error", f"the keeper of {folder} died before it could write there: is the disk full?")


def status(root: str, job: str) -> dict:
    """The job's state, also when its keeper was killed: then what it left running is killed too."""
    folder = _folder(root, job)
    state = read_state(folder)
    if state is None:
        raise Refusal("unknown", f"no job {job} in {root}: was it another folder when it was started?")
    if state["host"] != HOST:
        raise Refusal("refused", f"job {job} was started on {state['host']}, which shares {root}: ask that host")
    if state["state"] != "running" or process_start(state["keeper"]) == state["keeper_start"]:
        return state
    state = read_state(folder) or state  # it may have ended between the two looks
    if state["state"] == "running":
        _kill(job_processes(folder))
        message = "its keeper is gone: machine taken or restarted"
        ended_at = max(os.path.getmtime(os.path.join(folder, "log")), state["started_at"])
        state.update(state="preempted", message=message, ended_at=ended_at)
    return state


def cancel(root: str, job: str, wait_s: float) -> dict:
    """End the job and return its state once it has ended, in `wait_s` at most."""
    state, until = status(root, job), time.monotonic() + wait_s
    if state["state"] == "running":
        open(os.path.join(_folder(root, job), "cancel"), "w").close()
    while state["state"] == "running":
        if time.monotonic() > until:
            still = f"still runs as pid {state['keeper']}: end that process yourself"
            raise Refusal("error", f"job {job} was told to end and {still}")
        time.sleep(LOOK_S)
        state = status(root, job)
    return state


def log(root: str, job: str, offset: int, wait_s: float) -> list:
    """[the log from a byte on, in Latin-1; whether there is more to ask for]. Waits `wait_s` for something new."""
    until = time.monotonic() + wait_s
    while True:
        runs = status(root, job)["state"] == "running"  # looked at before the log: its last words are read
        with open(os.path.join(_folder(root, job), "log"), "rb") as file:
            file.seek(offset)
            data = file.read(CHUNK_BYTES)
        if data or not runs or time.monotonic() >= until:
            return [data.decode("latin-1"), len(data) == CHUNK_BYTES or (runs and wait_s > 0)]
        time.sleep(LOOK_S)


def find(root: str, run: str) -> list:
    """[site, attempt] of a run's jobs, ended ones too."""
    from pathlib import Path

    folders = [path.parent for path in Path(root, "jobs", run).glob("*/*/state.json") if path.parent.name.isdigit()]
    ours = [each for each in folders if (read_state(str(each)) or {}).get("host") == HOST]
    return sorted([each.parent.name, int(each.name)] for each in ours)


def reply(request: dict) -> dict:
    """The reply to a request: its "answer", or why there is none as "unknown", "refused" or "error"."""
    arguments = {**request, "root": os.path.abspath(os.path.expanduser(request["root"]))}
    verbs = {"start": start, "status": status, "cancel": cancel, "log": log, "find": find}
    try:
        return {"answer": verbs[arguments.pop("verb")](**arguments)}
    except Refusal as refusal:
        return dict([refusal.args])
    except OSError as error:
        return {"error": str(error)}


def main() -> None:
    """Answer the request on standard input by a line on standard output."""
    print(f"\n{REPLY}{json.dumps(reply(json.loads(sys.stdin.readline())))}", flush=True)


def read_state(folder: str) -> dict | None:
    """The state as the keeper last wrote it; None when no job was started in that folder."""
    try:
        with open(os.path.join(folder, "state.json"), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def _write_state(folder: str, state: dict) -> None:
    path = os.path.join(folder, "state.json")
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def _folder(root: str, job: str) -> str:
    return os.path.join(root, "jobs", *job.split("/"))


# --- the keeper ------------------------------------------------------------------------------------------------------


def _keep(folder: str, request: dict, lock) -> None:
    """Own a job's command from its start to its end. The lock is let go once the job's state is on disk."""
    import ctypes

    orders: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the machine shuts down
        signal.signal(number, lambda *_: orders.append("preempted"))
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    own_log = os.open(os.path.join(folder, "keeper.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, target in enumerate((null, null, own_log)):
        os.dup2(target, number)
    with contextlib.suppress(AttributeError):  # Linux has it: orphans of the command become ours
        ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    state = {
        "state": "running",
        "exit_code": None,
        "message": "running",
        "started_at": time.time(),
        "ended_at": None,
        "host": HOST,
        "keeper": os.getpid(),
        "keeper_start": process_start(os.getpid()),
    }
    with open(os.path.join(folder, "log"), "ab", buffering=0) as output:
        _write_state(folder, state)
        lock.close()
        state.update(_run(folder, request, orders, output))
    _write_state(folder, {**state, "ended_at": time.time()})


def _run(folder: str, request: dict, orders: list[str], output) -> dict:
    """Run the command, its log going to `output`; what its end changes in the job's state."""
    import subprocess
    import threading

    from composer_prime.redaction import Redactor, hidden_values

    folder_of_site = os.path.join(os.path.dirname(folder), "work")
    given = {**request["env"], **request["secrets"], JOB_VARIABLE: folder}
    try:
        os.makedirs(folder_of_site, exist_ok=True)
        process = subprocess.Popen(
            request["command"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env={**request["defaults"], **os.environ, **given},
            cwd=folder_of_site,
            start_new_session=True,
        )
    except OSError as error:
        message = f"{request['command'][0]} could not be started: {error.strerror}"
        output.write(f"{message}\n".encode())
        return {"state": "failed", "exit_code": NOT_STARTED, "message": message}
    redactor = Redactor(hidden_values(request["secrets"]))
    copying = threading.Thread(target=_copy, args=(process.stdout, redactor, output), daemon=True)
    copying.start()
    order = _watch(process, folder, request, orders)
    while left := job_processes(folder, os.getpid()):  # also in process groups and sessions of their own
        _kill(left)
        time.sleep(0.005)
    copying.join(CONFIRM_S)
    if order is not None:
        return {"state": order, "message": order}
    code = process.returncode
    return {"state": "failed" if code else "succeeded", "exit_code": code, "message": f"exit code {code}"}


def _watch(process, folder: str, request: dict, orders: list[str]) -> str | None:
    """Wait for the command's end: the state of a job that was made to end, None for one that ended by itself."""
    order, until = None, time.monotonic() + request["timeout_s"]
    while process.poll() is None:
        is_late = time.monotonic() >= until
        if order is None:
            found = ["cancelled"] if os.path.exists(os.path.join(folder, "cancel")) else orders
            order = found[0] if found else "timed-out" if is_late else None
            if order is not None:
                process.terminate()  # it alone: it ends its own children, in its own order
                until = time.monotonic() + request["grace_s"]
        elif is_late:
            _kill([process.pid, *job_processes(folder, os.getpid())])
        time.sleep(LOOK_S)
    return order


def _copy(source, redactor, output) -> None:
    """Write the log until nobody can write to it any more; a full disk must not end the job."""
    data = b"."
    while data:
        data = source.read(CHUNK_BYTES)
        with contextlib.suppress(OSError):
            output.write(redactor.feed(data) if data else redactor.flush())
