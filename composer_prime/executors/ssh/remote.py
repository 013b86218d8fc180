"""What runs on a host that sites are started on over ssh: one call a process, the request given by connection.py.

Standard library, shim.py and redaction.py only, Python 3.9 or later: all are copied there. Answers are one marked line
of JSON; a log's bytes follow theirs.

    jobs/RUN/SITE/ATTEMPT/   a job's folder, as shim.py has it; beside it `work`, which all attempts of a site share
    venv/                    an environment whose programs jobs find first, where there is one

Several hosts may share the folder (a home on NFS, say): each answers for its own jobs alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections import namedtuple

from composer_prime.executors.local import shim

REPLY = "composer-prime-reply "
"""Begins the line that holds an answer: login scripts print too."""


class Here(namedtuple("Here", ("root", "host"))):  # not typing's, which costs a call a fifth of its time
    """This host: the folder of everything, and its own name."""

    __slots__ = ()


def answer(request: dict) -> None:
    """Do what a request asks for, and say what came of it."""
    operation = {"find": find, "start": start, "status": status, "cancel": cancel, "logs": logs}[request["operation"]]
    here = Here(os.path.abspath(os.path.expanduser(request["workdir"])), os.uname().nodename)
    try:
        reply = {"answer": operation(here, **request["arguments"])}
    except LookupError as error:
        reply = {"unknown": error.args[0]}
    except ValueError as error:
        reply = {"refused": str(error)}
    except OSError as error:
        reply = {"error": str(error)}
    _say(reply)


def find(here: Here, run: str) -> list:
    """A run's jobs, ended ones too, as SITE/ATTEMPT."""
    top = os.path.join(here.root, "jobs", run)
    return [os.path.relpath(job["folder"], top) for job in shim.list_jobs(top, here.host)]


def start(here: Here, job: str, request: dict) -> None:
    """Start a job unless it was. Raises ValueError for what can't be here."""
    folder = _folder(here, job)
    programs, path = os.path.join(here.root, "venv", "bin"), os.environ.get("PATH", os.defpath)
    request["env"].setdefault("PATH", programs + os.pathsep + path if os.path.isdir(programs) else path)
    request["host"] = here.host
    request["cwd"] = os.path.join(os.path.dirname(folder), "work")
    for name, cache in request.pop("caches").items():
        try:
            os.makedirs(cache, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cache {name} ({cache}) can't be made: {error.strerror}: give a folder that you may write"
            ) from None
    shim.start(folder, request)


def status(here: Here, job: str) -> dict:
    """A job's state. Raises LookupError for one that isn't here, ValueError for another host's."""
    known = shim.read_state(_folder(here, job))
    if known is not None and known["host"] != here.host:
        raise ValueError(f"job {job} was started on {known['host']}, which shares {here.root}: ask that host")
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


def _folder(here: Here, job: str) -> str:
    return os.path.join(here.root, "jobs", *job.split("/"))


def _say(reply: dict) -> None:
    sys.stdout.write(f"\n{REPLY}{json.dumps(reply)}\n")
    sys.stdout.flush()
