"""Sites on Modal: each job is one call of a deployed function, found again by a record that was there before it.

modal_job_body.py is the program in the container. Preemption: Modal starts an interrupted call again by itself, without
end and without telling; here the second container goes at once and the job is PREEMPTED, so that restarts, and what
they cost, stay the fleet's.

Not by Modal's sandboxes: they take one kind of GPU and no `nonpreemptible`, `Sandbox.create` waits for a machine and
gives up after 21 minutes, and those with a GPU are found neither by name nor in the list once they have ended.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import modal
from modal import exception
from modal.config import config

from composer_prime.errors import JobUnknown
from composer_prime.executors.base import Executor, Job, JobSpec, JobState, JobStatus, Price, hides_secrets, parse_name
from composer_prime.executors.local import split_lines
from composer_prime.executors.modal_deploy import (
    FAILURES,
    MAX_TIMEOUT_S,
    TIMEOUT_MARGIN_S,
    Connection,
    check_spec,
    deployed_function,
    dockerfile,
    machine,
    object_name,
    price,
    token,
)
from composer_prime.executors.modal_job_body import TIMEOUT_GRACE_S, first
from composer_prime.executors.services import end_job

T = TypeVar("T")
PLATFORM = "modal"
NO_CALL = ""
CONFIRM_S = 60.0
"""How long the end of a cancelled call is waited for."""
LOG_PAUSE_S = 1.0
LATE, AHEAD = timedelta(seconds=15), timedelta(minutes=2)
"""How late an entry of a log may arrive behind younger ones, and how far Modal's clock may be ahead of ours."""
OVERRUN_S = TIMEOUT_MARGIN_S + int(TIMEOUT_GRACE_S)
"""A command past its time gets its grace to end; where the container's program has lost its senses, Modal ends it after
the margin and takes a while."""
ENDS = (exception.RemoteError, exception.InternalFailure, exception.ExecutionError, exception.DeserializationError)
"""Errors of the client for a call that ended; its other errors are of the connection."""


class Records:
    """Which call of Modal's is which job: one modal.Dict a run, whose entries decide who may run what.

    Modal has no name for a call, so a caller killed after `spawn` could lose it, or start it twice. Here each job has
    create-once entries, and a container looks at them before it does any work:

        {job}/claim   when the job was claimed: written before `spawn`, so that `find` sees the job
        {job}/call    the one call that may run it: the first to be written, by a caller after `spawn` or a container at
                      its start; "" when it was cancelled while it had none. Containers of any other call end at once
        {job}/start   the container that ran it; a second one of the same call finds it and ends at once ("preempted")
        {job}/end     when and why the call was ended: somebody asked for it, or Modal took that container back

    Modal drops entries that nobody read or wrote for seven days; a job has ended long before.

    Methods but `create` raise JobUnknown when the run has no Dict.
    """

    def __init__(self, connection: Connection, run: str) -> None:
        self.name = object_name(run)
        self._connection = connection
        self._dict = modal.Dict.from_name(self.name, client=connection.client)

    def create(self) -> None:
        """Make the Dict, unless the run has one."""
        client = self._connection.client
        make = modal.Dict.objects.create
        self._connection.ask(f"records {self.name}", lambda: make(self.name, allow_existing=True, client=client))

    def get(self, job: str, entry: str) -> Any:
        """An entry of a job, None if there is none."""
        return self._connection.ask(f"records {self.name}", lambda: self._dict.get(f"{job}/{entry}"))

    def first(self, job: str, entry: str, value: T) -> T:
        """The value that the entry has for good: `value`, or what was written before."""
        return self._connection.ask(f"records {self.name}", lambda: first(self._dict, f"{job}/{entry}", value))

    def claimed(self) -> list[str]:
        """The names of all jobs."""
        keys = self._connection.ask(f"records {self.name}", lambda: list(self._dict.keys()))
        return [key.removesuffix("/claim") for key in keys if key.endswith("/claim")]


class ModalExecutor(Executor):
    """The workspace that the token of this process belongs to (see executors/base.py for the contract)."""

    platform = PLATFORM

    def __init__(self) -> None:
        self._connection = Connection()
        self._runs: dict[str, Records] = {}

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        check_spec(spec)

    def credentials(self) -> dict[str, str]:
        """Another machine's client works by them in the same workspace and environment."""
        token()
        names = ("token_id", "token_secret", "server_url", "environment")
        return {f"MODAL_{name.upper()}": config[name] for name in names if config[name]}

    def machine(self, spec: JobSpec) -> str:
        asked = ", ".join(f"{name} {value}" for name, value in machine(spec.resources).items() if value)
        return f"a container of Modal's: {asked or 'an eighth of a core'}"

    def script(self, spec: JobSpec) -> str:
        return "\n".join(line for part in dockerfile(spec) for line in part)

    def price(self, spec: JobSpec) -> Price:
        return replace(price(spec.resources), overrun_s=OVERRUN_S)

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        self.check(spec)
        job = Job(PLATFORM, spec.name, spec.run, spec.site, spec.attempt)
        records = self._records(spec.run)
        records.create()
        if records.get(job.id, "call") is not None:
            return job
        # Before the claim: an image that can't be built leaves no job behind.
        function = deployed_function(self._connection, spec)
        records.first(job.id, "claim", time.time())
        argument = {
            "name": spec.name,
            "records": records.name,
            "command": list(spec.command),
            "env": spec.variables,
            "timeout_s": min(spec.timeout_s, MAX_TIMEOUT_S - TIMEOUT_MARGIN_S),
        }
        call = self._connection.ask(f"start of {job.id}", lambda: function.spawn(argument))
        if records.first(job.id, "call", call.object_id) != call.object_id:
            # Somebody else's call has the job; this one would find that out itself, at the price of a start.
            self._end(job, call)
        return job

    def account(self) -> str:
        """The workspace, and the environment in it where records are looked up: another's aren't seen."""
        workspace = modal.Workspace.from_context(client=self._connection.client)
        self._connection.ask("name of the workspace", workspace.hydrate)
        return "/".join(part for part in (workspace.name, config["environment"]) if part)

    def find(self, run: str) -> list[Job]:
        try:
            names = self._records(run).claimed()
        except JobUnknown:
            return []
        jobs = [Job(PLATFORM, name, *parts) for name in names if (parts := parse_name(name))]
        return sorted(jobs, key=lambda job: (job.site, job.attempt))

    def poll(self, job: Job) -> JobStatus:
        records, call_id = self._records(job.run), self._call_id(job)
        if call_id is None:
            return JobStatus(JobState.PENDING, message="claimed; no call is recorded yet", half_submitted=True)
        if call_id == NO_CALL:
            return JobStatus(JobState.CANCELLED, message="cancelled before it had a call")
        call = self._call(call_id)
        answer = self._connection.ask(f"state of {job.id}", lambda: _answer(call))
        start, end = records.get(job.id, "start") or {}, records.get(job.id, "end")
        started_at = start.get("started_at")
        if answer is None:
            if end is not None:
                self._end(job, call)  # or Modal would start it again, to be told to go
            state, word = (JobState.RUNNING, f"running in {start['task']}") if start else (JobState.PENDING, "waiting")
            return JobStatus(state, message=f"{call_id}: {word}", started_at=started_at)
        end = answer if "ended_at" in answer else end or answer  # the container's own word is the first
        message = f"{call_id}: {end['message']}"
        return JobStatus(JobState(end["state"]), end.get("exit_code"), message, started_at, end.get("ended_at"))

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        return split_lines(self._log(job, follow))

    def cancel(self, job: Job) -> JobStatus:
        return end_job(job, self.poll(job), self._ask_end, self.poll, CONFIRM_S, "https://modal.com/apps")

    def close(self) -> None:
        self._connection.close()
        self._runs.clear()

    def _records(self, run: str) -> Records:
        return self._runs.setdefault(run, Records(self._connection, run))

    def _call_id(self, job: Job) -> str | None:
        """The recorded call; None while there is none. Raises JobUnknown for a job that was never claimed, and for an
        id that is another's: a record in a bucket may say anything."""
        if job.id != f"{job.run}--{job.site}--{job.attempt}":
            raise JobUnknown(f"{job.id!r} is no id of attempt {job.attempt} of {job.run} {job.site}")
        records = self._records(job.run)
        call_id = records.get(job.id, "call")
        if call_id is None and records.get(job.id, "claim") is None:
            raise JobUnknown(f"{job.id}: Modal has no such job in {records.name}; entries unused for 7 days are gone")
        return call_id

    def _call(self, call_id: str) -> modal.FunctionCall:
        return modal.FunctionCall.from_id(call_id, client=self._connection.client)

    def _log(self, job: Job, follow: bool) -> Iterator[bytes]:
        since, seen = None, Counter[tuple[datetime, str]]()
        is_over = False
        while True:
            # Asked before the reading: what was written by then is read. Once more after the end, for what comes late.
            was_over, is_over = is_over, self.poll(job).state.final
            found = Counter[tuple[datetime, str]]()
            for entry in self._log_entries(job, since):
                key = (entry.timestamp, entry.message)
                found[key] += 1
                if found[key] > seen[key]:
                    yield entry.message.encode()
            if found:
                since, seen = max(timestamp for timestamp, _ in found) - LATE, found
            if was_over or not (follow or is_over):
                return
            time.sleep(LOG_PAUSE_S)

    def _log_entries(self, job: Job, since: datetime | None) -> list[Any]:
        if not (call_id := self._call_id(job)):
            return []
        fetch, until = self._call(call_id).logs.fetch, datetime.now(UTC) + AHEAD
        # What the command says as errors is in it too (modal_job_body.py), what Modal says of the container isn't.
        return self._connection.ask(f"log of {job.id}", lambda: list(fetch(since=since, until=until, source="stdout")))

    def _ask_end(self, job: Job) -> None:
        records = self._records(job.run)
        records.first(job.id, "end", {"state": "cancelled", "message": "cancelled", "ended_at": time.time()})
        # A call that nobody recorded yet finds this in its place, and goes.
        if (call_id := records.first(job.id, "call", NO_CALL)) != NO_CALL:
            self._end(job, self._call(call_id))

    def _end(self, job: Job, call: modal.FunctionCall) -> None:
        self._connection.ask(f"end of a call of {job.id}", lambda: call.cancel(terminate_containers=True))


def _answer(call: modal.FunctionCall) -> dict[str, Any] | None:
    """How a call ended: what the container's program said of it (job_body.run_job), else in the same form what Modal
    tells; None: it goes on. What is no end of it is raised."""
    try:
        return call.get(timeout=0)
    except TimeoutError:
        return None
    except exception.FunctionTimeoutError as error:
        return {"state": "timed-out", "message": str(error)}
    except (Exception, SystemExit, exception.InputCancellation) as error:
        if isinstance(error, FAILURES) and not isinstance(error, ENDS):
            raise
        # The client gives the same error for a call that was stopped and for one whose container can't start, and
        # raises here what was raised there before our program could answer.
        inputs = call.get_call_graph() if isinstance(error, exception.RemoteError) else []
        is_stopped = any(each.status == modal.types.InputStatus.TERMINATED for each in inputs)
        if is_stopped or isinstance(error, exception.InputCancellation):
            return {"state": "cancelled", "message": "stopped"}
        return {"state": "failed", "message": f"the container failed ({type(error).__name__}: {error})"}
