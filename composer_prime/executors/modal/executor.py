"""Sites on Modal: each job is one call of a deployed function, found again by a record that was there before it.

What decides who runs what is in records.py, what runs in the container in job_body.py. Preemption: Modal
starts an interrupted call again by itself, without end and without telling; here the second container goes at once and
the job is PREEMPTED, so that restarts, and what they cost, stay the fleet's.
"""

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from composer_prime.errors import ExecutorError, JobUnknown
from composer_prime.executors.base import Job, JobSpec, JobState, JobStatus, Price, check_names, hides_secrets
from composer_prime.executors.modal.client import (
    Connection,
    environment_name,
    login_variables,
    modal_package,
    require_proxy_support,
    require_token,
)
from composer_prime.executors.modal.deploy import FUNCTION, TIMEOUT_MARGIN_S, deployed_function, settings
from composer_prime.executors.modal.limits import MAX_TIMEOUT_S, check_spec, unbounded
from composer_prime.executors.modal.logs import LogReader
from composer_prime.executors.modal.records import NO_CALL, Records, object_name
from composer_prime.executors.prices import modal_price

PLATFORM = "modal"
CONFIRM_S = 60.0
"""How long the end of a cancelled call is waited for."""
CONFIRM_PAUSE_S, LOG_PAUSE_S, DRAIN_S = 0.5, 1.5, 1.0
OVERRUN_S = TIMEOUT_MARGIN_S + 40
"""A command past its time gets 40 s to end; where the container's program has lost its senses, Modal ends it after the
margin and takes a while."""
RECENT_S = 30.0
"""So long after its end a job's last lines may still be on their way."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended, as far as Modal tells.

    kind   "returned" (with what the container said), "timed-out", "stopped", "failed"
    """

    kind: str
    answer: dict[str, Any] = field(default_factory=dict)
    message: str = ""


class ModalExecutor:
    """The workspace that the token of this process belongs to (see executors/base.py for the contract)."""

    platform = PLATFORM

    def __init__(self) -> None:
        self._connection = Connection()
        self._runs: dict[str, Records] = {}
        self._account: str | None = None

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        check_names(spec)
        check_spec(spec)
        require_proxy_support()

    def log_in(self) -> None:
        require_token()

    def credentials(self) -> dict[str, str]:
        return login_variables()

    def describe(self, spec: JobSpec) -> str:
        check_names(spec)
        check_spec(spec)
        made_of = settings(spec)
        volumes = ", ".join(f"{name} at {path}" for path, name in made_of["volumes"].items())
        cores, memory, disk = made_of["cpu"], made_of["memory"], made_of["ephemeral_disk"]
        sizes = {
            "cpu": cores and f"{cores[1]} cores",
            "memory": memory and f"{memory[1]} MiB",
            "disk": disk and f"{disk} MiB",
        }
        lines = [
            f"Modal app {object_name(spec.run)}-<hash of these settings>, function {FUNCTION}",
            f"  image     {made_of['image']}",
            f"  gpu       {made_of['gpu'] or 'none'}",
            *(f"  {name:<9} {made_of[name]}" for name in ("region", "cloud") if made_of[name]),
            *(["  never taken back, at a price"] if made_of["nonpreemptible"] else []),
            *(f"  {name:<9} {size}, no more" for name, size in sizes.items() if size),
            f"  timeout   {spec.timeout_s} s, enforced by Modal at {made_of['timeout']} s; to start "
            f"{made_of['startup_timeout']} s; no retries; one job a container",
            f"  secrets   {', '.join(made_of['secrets']) or 'none'}",
            f"  volumes   {volumes or 'none'}",
            f"one call, recorded as {spec.name} in Modal dict {object_name(spec.run)}",
            *(f"  env       {name}={value}" for name, value in sorted({**spec.cache_env, **spec.env}.items())),
            f"  command   {shlex.join(spec.command)}",
        ]
        return spec.secrets.redact("\n".join(lines))

    def price(self, spec: JobSpec) -> Price:
        """By the second; `modal_limits.unbounded` says what an hour's price leaves open."""
        price = modal_price(spec.resources)
        return replace(price, overrun_s=OVERRUN_S, unbounded=unbounded(spec.resources))

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        self.check(spec)
        self.log_in()
        job = Job(PLATFORM, spec.name, spec.run, spec.site, spec.attempt)
        records = self._records(spec.run)
        records.create()
        if records.get(job.id, "call") is not None:
            return job
        # Before the claim: an image that can't be built leaves no job behind.
        function = deployed_function(self._connection, records, spec)
        records.claim(spec, time.time())
        argument = {
            "name": spec.name,
            "records": records.name,
            "command": list(spec.command),
            "env": {**spec.cache_env, **spec.env},
            "timeout_s": min(spec.timeout_s, MAX_TIMEOUT_S - TIMEOUT_MARGIN_S),
        }
        call = self._connection.ask(f"start of {spec.name}", lambda: function.spawn(argument))
        if records.first(job.id, "call", call.object_id) != call.object_id:
            # Somebody else's call has the job; this one would find that out itself, at the price of a start.
            self._connection.ask(f"end of a second {spec.name}", lambda: call.cancel(terminate_containers=True))
        return job

    def account(self) -> str:
        """The workspace, and the environment in it where records are looked up: another's aren't seen. Asked once."""
        if self._account is None:
            workspace = modal_package().Workspace.from_context(client=self._connection.client)
            self._connection.ask("name of the workspace", workspace.hydrate)
            self._account = "/".join(part for part in (workspace.name, environment_name()) if part)
        return self._account

    def find(self, run: str) -> list[Job]:
        try:
            claims = self._records(run).claims()
        except JobUnknown:
            return []
        jobs = [Job(PLATFORM, name, run, claim["site"], claim["attempt"]) for name, claim in claims.items()]
        return sorted(jobs, key=lambda job: (job.site, job.attempt))

    def poll(self, job: Job) -> JobStatus:
        records = self._records(job.run)
        call_id = self._call_id(job)
        if call_id is None:
            return JobStatus(JobState.PENDING, message="claimed; no call is recorded yet", half_submitted=True)
        if call_id == NO_CALL:
            return JobStatus(JobState.CANCELLED, message="cancelled before it had a call")
        call = self._call(call_id)
        outcome = self._connection.ask(f"state of {job.id}", lambda: _outcome(call))
        if outcome is not None and outcome.kind == "returned":
            return _returned(call_id, outcome.answer)
        start = records.get(job.id, "start") or {}
        started_at = start.get("started_at")
        if outcome is not None and outcome.kind in ("timed-out", "failed"):
            return self._ended_badly(job, call_id, outcome, started_at)
        cancelled_at = records.get(job.id, "cancel")
        end = records.get(job.id, "end")
        if end is not None and cancelled_at is None:
            if outcome is None:
                # Or Modal would start it again, to be told to go.
                self._connection.ask(f"end of {job.id}", lambda: call.cancel(terminate_containers=True))
            message = f"{call_id}: container {start.get('task')} was taken back"
            return JobStatus(JobState.PREEMPTED, None, message, started_at, end["ended_at"])
        if outcome is not None:
            return JobStatus(JobState.CANCELLED, None, f"{call_id}: stopped", started_at, cancelled_at)
        if not start:
            return JobStatus(JobState.PENDING, message=f"{call_id}: waiting for a container")
        return JobStatus(JobState.RUNNING, None, f"{call_id}: running in {start['task']}", started_at)

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        self._call_id(job)
        return self._lines(job, follow)

    def cancel(self, job: Job) -> JobStatus:
        status = self.poll(job)
        if status.state.final:
            return status
        records = self._records(job.run)
        records.first(job.id, "cancel", time.time())
        # A call that nobody recorded yet finds this in its place, and goes.
        call_id = records.first(job.id, "call", NO_CALL)
        if call_id != NO_CALL:
            call = self._call(call_id)
            self._connection.ask(f"end of {job.id}", lambda: call.cancel(terminate_containers=True))
        confirm_by = time.monotonic() + CONFIRM_S
        while not (status := self.poll(job)).state.final:
            if time.monotonic() > confirm_by:
                raise ExecutorError(
                    f"{job.id}: Modal hasn't confirmed its end in {CONFIRM_S:.0f} s, and it may still be billed: "
                    f"cancel again, or end call {call_id} at https://modal.com/apps"
                )
            time.sleep(CONFIRM_PAUSE_S)
        return status

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

    def _call(self, call_id: str) -> Any:
        return modal_package().FunctionCall.from_id(call_id, client=self._connection.client)

    def _ended_badly(self, job: Job, call_id: str, outcome: Outcome, started_at: float | None) -> JobStatus:
        message = f"{call_id}: {outcome.message}"
        if outcome.kind == "failed":
            return JobStatus(JobState.FAILED, None, message, started_at)
        # Modal's own end, which comes when the container's program has lost its senses.
        claim = self._records(job.run).get(job.id, "claim")
        ended_at = None if started_at is None else started_at + claim["timeout_s"] + TIMEOUT_MARGIN_S
        return JobStatus(JobState.TIMED_OUT, None, message, started_at, ended_at)

    def _lines(self, job: Job, follow: bool) -> Iterator[str]:
        reader: LogReader | None = None
        while True:
            # Before the reading: what was written by then is read.
            status = self.poll(job)
            call_id = self._call_id(job)
            if reader is None and call_id:
                reader = LogReader(self._connection, job.id, self._call(call_id))
            if reader is not None:
                yield from reader.new_lines()
            if status.state.final or not follow:
                break
            time.sleep(LOG_PAUSE_S)
        if reader is None:
            return
        if status.state.final and time.time() - (status.ended_at or 0) < RECENT_S:
            time.sleep(DRAIN_S)
            yield from reader.new_lines()
        yield from reader.last_line()


def _outcome(call: Any) -> Outcome | None:
    """How the call ended; None while it hasn't. What isn't an outcome is raised."""
    from grpclib.exceptions import StreamTerminatedError

    known = modal_package().exception
    try:
        return Outcome("returned", call.get(timeout=0))
    except TimeoutError:
        return None
    except known.FunctionTimeoutError as error:
        return Outcome("timed-out", message=str(error) or "ran past its time-out")
    except known.OutputExpiredError as error:
        raise JobUnknown("Modal no longer has a result that old") from error
    except known.InputCancellation:
        return Outcome("stopped")
    except known.RemoteError as error:
        # The client gives the same error for a call that was stopped and for one whose container can't start.
        if any(found.status == modal_package().types.InputStatus.TERMINATED for found in call.get_call_graph()):
            return Outcome("stopped", message=str(error))
        return Outcome("failed", message=f"the container failed ({error})")
    except (known.InternalFailure, known.ExecutionError, known.DeserializationError) as error:
        return Outcome("failed", message=f"the container failed ({type(error).__name__}: {error})")
    except (known.Error, StreamTerminatedError, OSError):
        # Of the connection, as far as anyone can tell: to be asked again.
        raise
    except (Exception, SystemExit) as error:
        # The client raises here what was raised there, before our program could answer.
        return Outcome("failed", message=f"the container failed ({type(error).__name__}: {error})")


def _returned(call_id: str, answer: dict[str, Any]) -> JobStatus:
    """The status by what the container's program said (job_body.run_job)."""
    states = {
        "preempted": JobState.PREEMPTED,
        "cancelled": JobState.CANCELLED,
        "timed-out": JobState.TIMED_OUT,
    }
    exit_code = answer.get("exit_code")
    state = states.get(answer["outcome"], JobState.SUCCEEDED if exit_code == 0 else JobState.FAILED)
    message = ": ".join(part for part in (call_id, answer["outcome"], answer.get("message")) if part)
    return JobStatus(state, exit_code, message, answer.get("started_at"), answer.get("ended_at"))
