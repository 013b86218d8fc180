"""Runs one command in a job's folder, apart from whoever started it, and writes down how it goes and how it ended.

Standard library and redaction.py only, Python 3.9 or later: both are copied to machines that have nothing of ours. Run
as `python3 shim.py start|status|cancel|log|list FOLDER`. A keeper process owns the command; the folder tells its state.

    lock         held while a job is started, so that of several starters one starts it
    state.json   replaced whole: state, reason, exit code, times, the keeper's pid and when that process began
    cancel       its being there asks the keeper to end the command
    log          both outputs in the order they came, secrets cut out
    keeper.log   what went wrong in the keeper itself

`start` reads one JSON object from standard input: `command` (argv), `timeout_s`, and optionally `env`, `secrets`
(both name -> value), `labels`, `cwd`, `grace_s`, and `host`, which says whose job it is where machines share the
folder. Secrets pass from there to the command's environment through memory alone. A job whose keeper is gone without
having written an end was preempted: its machine was taken, or restarted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # as typing has it, which takes as long to import as all of this
if TYPE_CHECKING:
    import subprocess

# A host is asked about a job by one process a question: what only keepers need is imported where they need it.

JOB_VARIABLE = "COMPOSER_PRIME_JOB"
"""Names the job's folder in the environment of all its processes."""

GRACE_S = 40.0
"""Seconds from SIGTERM to SIGKILL, for a command that is told to end: a site's trainer writes a checkpoint."""
CONFIRM_S = 20.0
"""Seconds beyond the grace in which a cancel must be confirmed."""
LOOK_S = 0.05
NOT_STARTED = 127
_CHUNK_BYTES = 1 << 16
_SET_PDEATHSIG, _SET_SUBREAPER = 1, 36  # prctl's


# --- processes -------------------------------------------------------------------------------------------------------


def process_start(pid: int) -> str | None:
    """What tells a process from a later one of the same pid; None when there is none, or a dead one not yet reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
        import subprocess

        asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], stdout=subprocess.PIPE)
        return asked.stdout.decode().strip() or None
    return None if fields[0] == b"Z" else f"{boot}:{fields[19].decode()}"


def family(pid: int) -> list[int]:
    """The live processes below a process, at any depth, where the system has /proc."""
    parents = {}
    for name in os.listdir("/proc") if os.path.exists("/proc/self/stat") else []:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != b"Z":
                parents[int(name)] = int(fields[1])
    found, level = [], [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found


def job_processes(folder: str) -> list[int]:
    """The live processes that carry the job's mark in their environment, where the system has /proc."""
    mark = f"{JOB_VARIABLE}={os.path.abspath(folder)}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.exists("/proc/self/stat") else []:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _prctl(option: int, value: int) -> None:
    """Ask the kernel, on Linux; elsewhere orderly ends alone are covered."""
    import ctypes

    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, value, 0, 0, 0)


# --- the folder ------------------------------------------------------------------------------------------------------


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


def status(folder: str) -> dict | None:
    """The job's state, also when its keeper was killed: then what it left running is killed too.

    `state` is "pending", "running" or "ended"; `reason` of an end "exited", "cancelled", "timed-out" or "preempted".
    """
    state = read_state(folder)
    if state is None or state["state"] == "ended" or process_start(state["keeper"]) == state["keeper_start"]:
        return state
    state = read_state(folder) or state  # it may have ended between the two looks
    if state["state"] == "ended":
        return state
    _kill(job_processes(folder))
    log = os.path.join(folder, "log")
    seen_at = os.path.getmtime(log) if os.path.exists(log) else state["created_at"]
    gone = {
        "state": "ended",
        "reason": "preempted",
        "message": "its keeper is gone: machine taken or restarted",
    }
    return {**state, **gone, "ended_at": max(seen_at, state["started_at"] or 0.0)}


def cancel(folder: str) -> dict | None:
    """End the job and return its state once it has ended; TimeoutError when the keeper doesn't get there."""
    state = status(folder)
    if state is None or state["state"] == "ended":
        return state
    os.close(os.open(os.path.join(folder, "cancel"), os.O_CREAT | os.O_WRONLY, 0o600))
    deadline = time.monotonic() + state["grace_s"] + CONFIRM_S
    while state is not None and state["state"] != "ended":
        if time.monotonic() > deadline:
            raise TimeoutError(f"job {folder} was told to end and still runs as pid {state['keeper']}")
        if process_start(state["keeper"]) == state["keeper_start"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state["keeper"], signal.SIGUSR1)
        time.sleep(LOOK_S)
        state = status(folder)
    return state


def follow_log(folder: str, follow: bool):
    """The log's bytes in chunks, from its start; with `follow`, as they come until the job has ended."""
    path = os.path.join(folder, "log")
    position = 0
    while True:
        state = status(folder)  # looked at before the log: what it wrote before its end is read
        done = not follow or state is None or state["state"] == "ended"
        if os.path.exists(path):
            with open(path, "rb") as file:
                file.seek(position)
                while True:
                    chunk = file.read(_CHUNK_BYTES)
                    if not chunk:
                        break
                    position += len(chunk)
                    yield chunk
        if done:
            return
        time.sleep(LOOK_S)


# --- starting --------------------------------------------------------------------------------------------------------


def start(folder: str, request: dict) -> bool:
    """Start the job apart from this process; False when one was started in that folder before.

    The keeper holds the lock until its state is on disk, so a starter killed half-way leaves a job or none.
    """
    folder = os.path.abspath(folder)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read_state(folder) is not None:
            return False
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                if os.fork() == 0:
                    Keeper(folder, request).run(started=lambda: (os.close(lock), os.close(writing)))
            except BaseException:
                import traceback

                traceback.print_exc()  # by then in keeper.log
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        os.read(reading, 1)  # until the keeper has written its state, or died
        os.close(reading)
    finally:
        os.close(lock)
    if read_state(folder) is None:
        raise OSError(f"the keeper of {folder} died before it could write there: is the disk full?")
    return True


class Keeper:
    """The process that owns a job's command: starts it, writes its log, ends it when told to, writes its end."""

    def __init__(self, folder: str, request: dict) -> None:
        from composer_prime.redaction import Redactor, hidden_values

        self._folder = folder
        self._secrets = dict(request.get("secrets") or {})
        given = {**(request.get("env") or {}), **self._secrets, JOB_VARIABLE: folder}
        self._env = {**(request.get("defaults") or {}), **os.environ, **given}
        self._cwd = request.get("cwd") or folder
        self._redactor = Redactor(hidden_values(self._secrets))
        self._told_to_end = False
        self._state = {
            "state": "pending",
            "reason": None,
            "exit_code": None,
            "message": "",
            "labels": request.get("labels") or {},
            "host": request.get("host"),
            "command": list(request["command"]),
            "timeout_s": float(request["timeout_s"]),
            "grace_s": float(request.get("grace_s", GRACE_S)),
            "keeper": os.getpid(),
            "keeper_start": None,
            "created_at": time.time(),
            "started_at": None,
            "ended_at": None,
        }

    def run(self, started) -> None:
        """Keep the job until its end. `started` is called once its state is on disk."""
        null = os.open(os.devnull, os.O_RDWR)
        own_log = os.open(os.path.join(self._folder, "keeper.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, target in enumerate((null, null, own_log)):
            os.dup2(target, number)
        self._wake, waker = os.pipe()
        for end in (self._wake, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end_soon)
        _prctl(_SET_SUBREAPER, 1)
        self._write(keeper=os.getpid(), keeper_start=process_start(os.getpid()))
        started()
        with open(os.path.join(self._folder, "log"), "ab", buffering=0) as self._log:
            self._keep()

    def _end_soon(self, *_) -> None:
        self._told_to_end = True

    def _write(self, **changes) -> None:
        self._state.update(changes)
        _write_state(self._folder, self._state)

    def _keep(self) -> None:
        if self._order() is not None:
            self._write(state="ended", reason=self._order(), ended_at=time.time())
            return
        try:
            process = self._start_command()
        except OSError as error:
            self._emit(f"{self._state['command'][0]}: {error.strerror}\n".encode())
            message = f"could not be started: {error.strerror}"
            self._write(state="ended", reason="exited", exit_code=NOT_STARTED, message=message, ended_at=time.time())
            return
        self._write(state="running", started_at=time.time())
        reason = self._watch(process)
        self._clear()
        self._drain(process)
        self._emit(self._redactor.flush())
        self._write(state="ended", reason=reason, exit_code=process.returncode, ended_at=time.time())

    def _start_command(self) -> subprocess.Popen:
        import subprocess

        os.makedirs(self._cwd, exist_ok=True)
        return subprocess.Popen(
            self._state["command"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=self._env,
            cwd=self._cwd,
            start_new_session=True,
            preexec_fn=lambda: _prctl(_SET_PDEATHSIG, signal.SIGKILL),
        )

    def _order(self) -> str | None:
        """Why the command must end now."""
        if os.path.exists(os.path.join(self._folder, "cancel")):
            return "cancelled"
        return "preempted" if self._told_to_end else None

    def _watch(self, process: subprocess.Popen) -> str:
        """Write the log until the command has ended; the reason for its end."""
        reason = None
        until = time.monotonic() + self._state["timeout_s"]
        while process.poll() is None:
            now = time.monotonic()
            if reason is None:
                reason = self._order() or ("timed-out" if now >= until else None)
                if reason is not None:
                    process.terminate()  # it alone: it ends its own children, in its own order
                    until = now + self._state["grace_s"]
            elif now >= until:
                _kill([process.pid, *family(os.getpid())])
                until = now + 1.0
            self._pump(process, max(0.0, min(until - now, 3600.0)))
        return reason or "exited"

    def _pump(self, process: subprocess.Popen, wait_s: float) -> bool:
        """Wait for output, a signal, or so long; False when all who could write are gone."""
        output = process.stdout
        assert output is not None
        open_outputs = [] if output.closed else [output.fileno()]
        ready, _, _ = select.select([*open_outputs, self._wake], [], [], wait_s)
        if self._wake in ready:
            os.read(self._wake, _CHUNK_BYTES)
        if open_outputs and open_outputs[0] in ready:
            data = os.read(open_outputs[0], _CHUNK_BYTES)
            if not data:
                output.close()
            self._emit(self._redactor.feed(data))
        return not output.closed

    def _drain(self, process: subprocess.Popen) -> None:
        """What the ended command had written and nobody has read."""
        deadline = time.monotonic() + CONFIRM_S
        while time.monotonic() < deadline and self._pump(process, 1.0):
            continue

    def _emit(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._log.write(view) :]
        except OSError as error:  # a full disk must not end the job
            self._state["message"] = f"its log is not whole: {error.strerror}"

    def _clear(self) -> None:
        """Kill whatever the command left behind, also in process groups and sessions of its own."""
        while True:
            left = family(os.getpid())
            _kill(left)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            if not left:
                return
            time.sleep(0.005)


def list_jobs(root: str, host: str | None = None) -> list[dict]:
    """The states of all jobs below a folder, of this host alone where one is given, each with its `folder`."""
    found = []
    for folder, folders, files in os.walk(root):
        if "state.json" in files:
            folders.clear()
            known = read_state(folder)
            # Another machine's pids mean nothing here: its jobs would be taken for preempted.
            state = status(folder) if known is not None and host in (None, known.get("host")) else None
            if state is not None:
                found.append({**state, "folder": folder})
    return sorted(found, key=lambda state: state["folder"])


def main(arguments: list[str]) -> int:
    """The command line. Answers are JSON, but for `log`; exit code 1: no such job."""
    verb, folder = arguments[0], arguments[1]
    if verb == "start":
        is_new = start(folder, json.load(sys.stdin))
        print(json.dumps({"new": is_new, **(status(folder) or {})}))
    elif verb == "list":
        print(json.dumps(list_jobs(folder)))
    elif read_state(folder) is None:
        print(f"no job in {folder}", file=sys.stderr)
        return 1
    elif verb == "log":
        for chunk in follow_log(folder, "--follow" in arguments):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    else:
        print(json.dumps({"status": status, "cancel": cancel}[verb](folder)))
    return 0


if __name__ == "__main__":
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))  # where our package is
    sys.exit(main(sys.argv[1:]))
