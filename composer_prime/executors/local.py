"""Jobs as processes of one host, each with a keeper of its own (shim.py), and this machine as such a host.

All that is known of a job is in its folder on the host, so any process of the same user finds it again: here in
`$COMPOSER_PRIME_STATE/jobs/RUN/SITE/ATTEMPT`.
"""

import inspect
import json
import os
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from composer_prime import redaction
from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors import shim
from composer_prime.executors.base import (
    Executor,
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

STATE_VARIABLE = "COMPOSER_PRIME_STATE"
SHIM_COMMAND = ("-I", "-S", "-c", "import json, sys; exec(json.loads(sys.stdin.readline()))")
"""Python's arguments for a shim; its code and its request come over standard input (`shim_input`)."""
LOG_WAIT_S, LOG_PAUSE_S = 10.0, 0.5
"""How long one request waits for something new in a log, and what lies between two: each may be a login elsewhere."""


class HostExecutor(Executor):
    """One host as a platform. It has no queue: a job runs as soon as it is submitted.

    host      its name in jobs' ids
    root      the folder there of all jobs
    grace_s   seconds that a job has to end by itself after it was told to, before it is killed
    """

    where: str
    """The host, for people."""

    def __init__(self, host: str, root: str, grace_s: float) -> None:
        self._name = host
        self._root = root
        self._grace_s = grace_s

    @abstractmethod
    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The shim's reply to a request. Raises ExecutorError where there is none after all repetitions."""

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        check_names(spec)
        refuse_placement(spec, self.where)

    def log_in(self) -> None: ...  # the machine is this user's, or asks for keys itself

    def machine(self, spec: JobSpec) -> str:
        return f"{self._name}, in {self._root}/jobs/{spec.run}/{spec.site}/{spec.attempt}"

    def describe(self, spec: JobSpec) -> str:
        return super().describe(replace(spec, image=None))  # there are no containers

    def price(self, spec: JobSpec) -> Price:
        return Price(0.0, self.where, round(self._grace_s))

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        """Start the job's keeper; the folder's lock decides between submitters that race."""
        self.check(spec)
        job = self._job(spec.run, spec.site, spec.attempt)
        request = {
            "command": spec.command,
            "env": dict(spec.env),
            "defaults": spec.cache_env,
            "secrets": spec.secrets.reveal(),
            "caches": dict(spec.caches),
            "timeout_s": spec.timeout_s,
            "grace_s": self._grace_s,
        }
        try:
            self._ask("start", job=self._place(job), request=request)
        except ExecutorError as error:
            raise ExecutorError(f"{error}: job {spec.name} may run there: submit again to know") from None
        return job

    def find(self, run: str) -> list[Job]:
        return [self._job(run, site, attempt) for site, attempt in self._ask("find", run=check_name("run", run))]

    def poll(self, job: Job) -> JobStatus:
        return _status_of(self._ask("status", job=self._place(job)))

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        return split_lines(self._log(self._place(job), LOG_WAIT_S if follow else 0.0))

    def cancel(self, job: Job) -> JobStatus:
        wait_s = max(self._grace_s, shim.GRACE_S) + shim.CONFIRM_S  # a job's own grace is its submitter's
        try:
            return _status_of(self._ask("cancel", job=self._place(job), wait_s=wait_s))
        except ExecutorError as error:
            raise type(error)(f"{error}: job {job.id} may still run there") from None

    def _ask(self, verb: str, **arguments: Any) -> Any:
        """The shim's answer. Raises JobUnknown, BadInput and ExecutorError, as it says."""
        reply = self._call({"verb": verb, "root": self._root, **arguments})
        for word, kind in (("unknown", JobUnknown), ("refused", BadInput), ("error", ExecutorError)):
            if word in reply:
                raise kind(f"host {self._name}: {reply[word]}")
        return reply["answer"]

    def _log(self, place: str, wait_s: float) -> Iterator[bytes]:
        """The log from its start; a request that was lost is repeated from where the last one ended."""
        offset, has_more = 0, True
        while has_more:
            text, has_more = self._ask("log", job=place, offset=offset, wait_s=wait_s)
            offset += len(text)
            yield text.encode("latin-1")
            if has_more and len(text) < shim.CHUNK_BYTES:
                time.sleep(LOG_PAUSE_S)

    def _job(self, run: str, site: str, attempt: int) -> Job:
        return Job(self.platform, f"{run}/{site}/{attempt}@{self._name}", run, site, attempt)

    def _place(self, job: Job) -> str:
        """The job's folder below that of all jobs. Raises JobUnknown for an id that is none of the job."""
        place, _, host = job.id.partition("@")
        # A record in a bucket may say anything: nothing but this job's own folder may come of it.
        if place != f"{check_name('run', job.run)}/{check_name('site', job.site)}/{job.attempt}":
            raise JobUnknown(f"{job.id!r} is no id of attempt {job.attempt} of {job.run} {job.site}")
        if host != self._name:
            raise JobUnknown(f"job {job.id} is on {host}, and not on {self._name}: ask there")
        return place


class LocalExecutor(HostExecutor):
    """This machine as a platform."""

    platform, where = "local", "this machine"

    def __init__(self, state: Path | None = None, *, grace_s: float = shim.GRACE_S) -> None:
        super().__init__(shim.HOST, str(state or state_folder()), grace_s)

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        super().check(spec)
        for name, place in spec.caches.items():
            there = next(folder for folder in (Path(place), *Path(place).parents) if os.path.exists(folder))
            if not there.is_dir():
                raise BadInput(
                    f"cache {name} ({place}) can't be made: {there} is no folder: give a folder that you may write"
                )

    def describe(self, spec: JobSpec) -> str:
        """With what is exported here, which wins over the variables of caches."""
        exported = {name: os.environ[name] for name in spec.cache_env if name in os.environ}
        return super().describe(replace(spec, env={**exported, **spec.env}))

    def credentials(self) -> dict[str, str]:
        raise BadInput(
            "jobs on local are processes of this machine, and can't be watched from another: keep it running"
        )

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["verb"] != "start":
            return shim.reply(dict(request))
        done = subprocess.run(
            [sys.executable, *SHIM_COMMAND],
            input=shim_input(request),
            capture_output=True,
            start_new_session=True,  # Ctrl-C at the launcher must not tear a start in two
        )
        return read_reply(done.stdout, done.stderr)


def shim_input(request: Mapping[str, Any]) -> bytes:
    """The input of a shim: its code, and its request, which may hold secrets."""
    return f"{json.dumps(_shim_code())}\n{json.dumps(request)}\n".encode()


@cache
def _shim_code() -> str:
    code = "import sys, types\n"
    for module in (redaction, shim):
        name, source = module.__name__, inspect.getsource(module)
        code += f"module = sys.modules[{name!r}] = types.ModuleType({name!r})\n"
        code += f"exec(compile({source!r}, {name!r}, 'exec'), vars(module))\n"
    return f"{code}module.main()"


def read_reply(output: bytes, complaint: bytes) -> dict[str, Any]:
    """A shim's reply among what was written to standard output, else an error that says the last of the other."""
    for line in output.decode(errors="replace").split("\n"):
        if line.startswith(shim.REPLY):
            return json.loads(line.removeprefix(shim.REPLY))
    return {"error": complaint.decode(errors="replace").strip().rpartition("\n")[2] or "it said nothing"}


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


def _status_of(state: dict[str, Any]) -> JobStatus:
    kind = JobState(state["state"])
    return JobStatus(kind, state["exit_code"], state["message"], state["started_at"], state["ended_at"])
