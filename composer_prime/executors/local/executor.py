"""Jobs as processes on this machine: each has a keeper of its own (shim.py), which outlives whoever started it.

Everything is in `$COMPOSER_PRIME_STATE/jobs/<run>/<site>/<attempt>`, so any process of the same user finds it again.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import (
    Job,
    JobSpec,
    JobState,
    JobStatus,
    Price,
    check_name,
    check_names,
    hides_secrets,
    refuse_placement,
)
from composer_prime.executors.local import shim

STATE_VARIABLE = "COMPOSER_PRIME_STATE"
_ENDS = {"cancelled": JobState.CANCELLED, "timed-out": JobState.TIMED_OUT, "preempted": JobState.PREEMPTED}


class LocalExecutor:
    """This machine as a platform. It has no queue: a job runs as soon as it is submitted.

    grace_s   seconds that a job has to end by itself after it was told to, before it is killed
    """

    platform = "local"

    def __init__(self, state: Path | None = None, *, grace_s: float = shim.GRACE_S) -> None:
        self._jobs = (state or state_folder()) / "jobs"
        self._host = socket.gethostname()
        self._grace_s = grace_s

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        """Refuse what can't run here."""
        check_names(spec)
        refuse_placement(spec, "this machine")
        path = spec.env.get("PATH", os.environ.get("PATH"))
        if shutil.which(spec.command[0], path=path) is None:
            raise BadInput(
                f"command ({spec.command[0]}) isn't on this machine's PATH: install it, or give its full path"
            )
        for name, place in spec.caches.items():
            there = next(folder for folder in (Path(place), *Path(place).parents) if os.path.exists(folder))
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                raise _no_cache(name, place, f"{there} {'is not yours to write' if there.is_dir() else 'is no folder'}")

    def log_in(self) -> None:
        """Nothing: it is this user's machine."""

    def credentials(self) -> dict[str, str]:
        raise BadInput(
            "jobs on local are processes of this machine, and can't be watched from another: keep it running"
        )

    def describe(self, spec: JobSpec) -> str:
        """The command, its folder, and what it is given."""
        lines = [f"process on {self._host}: {' '.join(spec.command)}", f"folder {self._folder_of(spec)}"]
        own = {name: value for name, value in spec.cache_env.items() if name not in os.environ}
        given = sorted({**own, **spec.env}.items())
        lines += [f"env {name}={spec.secrets.redact(value)}" for name, value in given]
        lines += [f"secrets {', '.join(spec.secrets)}"] if len(spec.secrets) else []
        return "\n".join([*lines, f"time-out {spec.timeout_s} s"])

    def price(self, spec: JobSpec) -> Price:
        """Nothing."""
        return Price(0.0, "this machine", round(self._grace_s))

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        """Start the job's keeper; the folder's lock decides between submitters that race."""
        self.check(spec)
        for name, place in spec.caches.items():
            try:
                Path(place).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _no_cache(name, place, error.strerror or str(error)) from error
        folder = self._folder_of(spec)
        # The next attempt's folder too, so that it finds local checkpoints.
        request = {**keeper_request(spec, self._grace_s), "cwd": str(folder.parent / "work")}
        done = subprocess.run(
            [sys.executable, "-I", "-S", shim.__file__, "start", str(folder)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            start_new_session=True,  # Ctrl-C at the launcher must not tear a start in two
        )
        if done.returncode != 0:
            last = spec.secrets.redact(done.stderr.strip().rpartition("\n")[2])
            raise ExecutorError(f"job {spec.name} could not be started in {folder}: {last}")
        return self._job(spec.run, spec.site, spec.attempt)

    def find(self, run: str) -> list[Job]:
        """All jobs of a run that were ever started here."""
        check_name("run", run)
        found = []
        for state in (self._jobs / run).glob("*/*/state.json"):
            attempt, site = state.parent.name, state.parent.parent.name
            if attempt.isdigit():
                found.append(self._job(run, site, int(attempt)))
        return sorted(found, key=lambda job: (job.site, job.attempt))

    def poll(self, job: Job) -> JobStatus:
        """What the job's folder and its keeper's process say."""
        return self._status(job, shim.status(str(self._folder(job))))

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        """The log's lines; the keeper has cut the secrets out."""
        self.poll(job)
        return split_lines(shim.follow_log(str(self._folder(job)), follow))

    def cancel(self, job: Job) -> JobStatus:
        """Have the keeper end the job, and wait until it has."""
        try:
            return self._status(job, shim.cancel(str(self._folder(job))))
        except TimeoutError as error:
            raise ExecutorError(f"{error}: end that process yourself") from error

    def close(self) -> None:
        """Nothing to let go of."""

    def _folder_of(self, spec: JobSpec) -> Path:
        return self._jobs / spec.run / spec.site / str(spec.attempt)

    def _folder(self, job: Job) -> Path:
        place, _, host = job.id.rpartition("@")
        if place != f"{job.run}/{job.site}/{job.attempt}":
            raise JobUnknown(f"{job.id!r} is no id of attempt {job.attempt} of {job.run} {job.site}")
        if host != self._host:
            raise ExecutorError(f"job {job.id} is a process of {host}, and this is {self._host}: ask there")
        return self._jobs / check_name("run", job.run) / check_name("site", job.site) / str(job.attempt)

    def _job(self, run: str, site: str, attempt: int) -> Job:
        return Job(self.platform, f"{run}/{site}/{attempt}@{self._host}", run, site, attempt)

    def _status(self, job: Job, state: dict | None) -> JobStatus:
        if state is None:
            raise JobUnknown(f"no job {job.id} in {self._jobs}: is {STATE_VARIABLE} what it was when it was started?")
        return status_of(state)


def keeper_request(spec: JobSpec, grace_s: float) -> dict[str, Any]:
    """What a shim needs to know of a job, for its standard input alone: it holds the secrets."""
    return {
        "command": list(spec.command),
        "env": dict(spec.env),
        "defaults": spec.cache_env,
        "secrets": spec.secrets.reveal(),
        "timeout_s": spec.timeout_s,
        "grace_s": grace_s,
        "labels": spec.labels,
    }


def _no_cache(name: str, place: str, cause: str) -> BadInput:
    return BadInput(f"cache {name} ({place}) can't be made: {cause}: give a folder that you may write")


def status_of(state: dict) -> JobStatus:
    """A shim's state as the status that every platform gives."""
    if state["state"] != "ended":
        kind = JobState(state["state"])
    elif state["reason"] == "exited":
        kind = JobState.SUCCEEDED if state["exit_code"] == 0 else JobState.FAILED
    else:
        kind = _ENDS[state["reason"]]
    exit_code = state["exit_code"] if kind in (JobState.SUCCEEDED, JobState.FAILED) else None
    message = state["message"] or state["reason"] or state["state"]
    return JobStatus(kind, exit_code, message, state["started_at"], state["ended_at"])


def split_lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Lines without their ends, as they get whole; a last one without an end too. Only newlines end a line."""
    rest: list[bytes] = []
    for chunk in chunks:
        *whole, last = chunk.split(b"\n")
        for line in whole:
            yield (b"".join([*rest, line])).decode("utf-8", "replace")
            rest = []
        rest.append(last)
    if any(rest):
        yield b"".join(rest).decode("utf-8", "replace")


def state_folder() -> Path:
    """Where this user's jobs are remembered: `$COMPOSER_PRIME_STATE`, else under XDG's state folder."""
    given = os.environ.get(STATE_VARIABLE)
    if given:
        return Path(given).absolute()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "composer-prime"
