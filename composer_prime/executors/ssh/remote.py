"""What runs on a host for each call: one operation on the jobs of that host, its request read from standard input.

Standard library, shim.py and redaction.py only, Python 3.9 or later: all are copied there. Answers are one marked line
of JSON; a log's bytes follow theirs.

    jobs/RUN/SITE/ATTEMPT/   a job's folder, as shim.py has it; beside it `work`, which all attempts of a site share
    placed/RUN/SITE/ATTEMPT  create-once: the name of the host that this job belongs to, on its recorder
    slots/HOST/N             locked by the process that keeps the job which has the slot, for as long as it lives

Several hosts may share the folder (a home on NFS, say): each has its own slots, and answers for its own jobs alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
from collections import namedtuple

from composer_prime.executors.local import shim

REPLY = "composer-prime-reply "
"""Begins the line that holds an answer: login scripts print too."""
SLOT_LOOK_S = 0.25


class Here(namedtuple("Here", ("root", "host"))):  # not typing's, which costs a call a fifth of its time
    """This host: the folder of everything, and its name in the hosts file."""

    __slots__ = ()


def answer(request: dict) -> None:
    """Do what a request asks for, and say what came of it."""
    operation = {
        "placed": placed,
        "place": place,
        "look": look,
        "find": find,
        "start": start,
        "status": status,
        "cancel": cancel,
        "logs": logs,
    }[request["operation"]]
    here = Here(os.path.abspath(os.path.expanduser(request["workdir"])), request["host"])
    try:
        reply = {"answer": operation(here, **request["arguments"])}
    except LookupError as error:
        reply = {"unknown": error.args[0]}
    except ValueError as error:
        reply = {"refused": str(error)}
    except OSError as error:
        reply = {"error": str(error)}
    _say(reply)


def placed(here: Here, job: str) -> str | None:
    """The host that a job (RUN/SITE/ATTEMPT) belongs to, as far as this host knows."""
    try:
        with open(os.path.join(here.root, "placed", job), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def place(here: Here, job: str, host: str) -> str:
    """Write down the host of a job unless one is; the one that counts."""
    path = os.path.join(here.root, "placed", job)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
        file.write(host)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(file.name, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(file.name)
    return placed(here, job) or host


def look(here: Here, job: str) -> dict:
    """Whether the host has this job, or earlier attempts of its site, and how many of its jobs haven't ended."""
    jobs = shim.list_jobs(os.path.join(here.root, "jobs"), here.host)
    folder = _folder(here, job)
    state = shim.read_state(folder)
    return {
        "has": state is not None and state["host"] == here.host,
        "had_site": os.path.isdir(os.path.dirname(folder)),
        "unfinished": sum(state["state"] != "ended" for state in jobs),
    }


def find(here: Here, run: str) -> list:
    """A run's jobs, ended ones too, as SITE/ATTEMPT."""
    top = os.path.join(here.root, "jobs", run)
    return [os.path.relpath(job["folder"], top) for job in shim.list_jobs(top, here.host)]


def start(here: Here, job: str, slots: int, gpus_per_slot: int, request: dict) -> None:
    """Start a job unless it was; it waits by itself for one of the slots. Raises ValueError for what can't be here."""
    folder = _folder(here, job)
    request["host"] = here.host
    request["cwd"] = os.path.join(os.path.dirname(folder), "work")
    programs = os.path.dirname(sys.executable)
    if os.path.exists(os.path.join(os.path.dirname(programs), "pyvenv.cfg")):  # an environment: its commands come first
        path = request["env"].get("PATH", os.environ.get("PATH", os.defpath))
        request["env"]["PATH"] = programs + os.pathsep + path
    slot_folder = os.path.join(here.root, "slots", here.host)
    os.makedirs(slot_folder, exist_ok=True)
    for name, cache in request.pop("caches").items():
        try:
            os.makedirs(cache, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cache {name} ({cache}) can't be made: {error.strerror}: give a folder that you may write"
            ) from None
    shim.start(folder, request, lambda folder, request: SlotKeeper(folder, request, slot_folder, slots, gpus_per_slot))


def status(here: Here, job: str) -> dict:
    """A job's state. Raises LookupError for one that isn't here, ValueError for another host's."""
    known = shim.read_state(_folder(here, job))
    if known is not None and known["host"] != here.host:
        raise ValueError(
            f"job {job} is of the host {known['host']}, which shares {here.root}: give hosts their names back"
        )
    state = shim.status(_folder(here, job))
    if state is None:
        raise LookupError(f"no job {job} in {here.root}")
    return state


def cancel(here: Here, job: str) -> dict:
    """End a job and see that it has ended. Raises LookupError, and TimeoutError when it doesn't end."""
    status(here, job)
    return shim.cancel(_folder(here, job)) or {}


def logs(here: Here, job: str, offset: int, follow: bool) -> None:
    """Answer, then write the job's log from `offset` bytes on, and end this process: that was all."""
    import threading

    status(here, job)
    _say({"answer": None})
    threading.Thread(target=_end_with_reader, daemon=True).start()
    position = 0
    for chunk in shim.follow_log(_folder(here, job), follow):
        sys.stdout.buffer.write(chunk[max(0, offset - position) :])
        sys.stdout.buffer.flush()
        position += len(chunk)
    os._exit(0)


def _end_with_reader() -> None:
    """End this process when whoever reads is gone: standard input ends then, and a quiet log would not show it."""
    sys.stdin.buffer.read()
    os._exit(1)


class SlotKeeper(shim.Keeper):
    """Keeps a job that waits until one of the host's slots is free, and holds that slot to its end."""

    def __init__(self, folder: str, request: dict, slot_folder: str, slots: int, gpus_per_slot: int) -> None:
        super().__init__(folder, request)
        self._slot_files = [os.path.join(slot_folder, str(number)) for number in range(slots)]
        self._gpus_per_slot = gpus_per_slot

    def _keep(self) -> None:
        slot = self._take_slot()
        if slot is None:
            self._write(message=f"waits for one of {len(self._slot_files)} slots")
            while slot is None and self._order() is None:
                if select.select([self._wake], [], [], SLOT_LOOK_S)[0]:
                    os.read(self._wake, 4096)
                slot = self._take_slot()
            self._write(message="")
        if slot is not None and self._gpus_per_slot:
            first = slot * self._gpus_per_slot
            self._env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + self._gpus_per_slot)))
        super()._keep()

    def _take_slot(self) -> int | None:
        """The number of a slot that is now ours. The kernel frees it when this process ends, however it does."""
        for number, path in enumerate(self._slot_files):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                continue
            return number
        return None


def _folder(here: Here, job: str) -> str:
    return os.path.join(here.root, "jobs", *job.split("/"))


def _say(reply: dict) -> None:
    sys.stdout.write(f"\n{REPLY}{json.dumps(reply)}\n")
    sys.stdout.flush()
