"""Sites on Modal: each job is one call of a deployed function, found again by a record that was there before it.

What decides who runs what is in records.py, what runs in the container in job_body.py. Preemption: Modal
starts an interrupted call again by itself, without end and without telling; here the second container goes at once and
the job is PREEMPTED, so that restarts, and what they cost, stay the fleet's.
"""

import shlex
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import modal
from modal import exception
from modal.config import config

from composer_prime.errors import ExecutorError, JobUnknown
from composer_prime.executors.base import Job, JobSpec, JobState, JobStatus, Price, hides_secrets, parse_name
from composer_prime.executors.modal.client import FAILURES, Connection, token
from composer_prime.executors.modal.deploy import TIMEOUT_MARGIN_S, deployed_function, settings
from composer_prime.executors.modal.job_body import TIMEOUT_GRACE_S
from composer_prime.executors.modal.limits import MAX_TIMEOUT_S, check_spec, unbounded
from composer_prime.executors.modal.records import NO_CALL, Records, object_name
from composer_prime.executors.prices import modal_price

PLATFORM = "modal"
CONFIRM_S, CONFIRM_PAUSE_S = 60.0, 0.5
"""How long the end of a cancelled call is waited for."""
LOG_PAUSE_S = 1.0
LATE, AHEAD = timedelta(seconds=15), timedelta(minutes=2)
"""How late an entry of a log may arrive behind younger ones, and how far Modal's clock may be ahead of ours."""
OVERRUN_S = TIMEOUT_MARGIN_S + int(TIMEOUT_GRACE_S)
"""A command past its time gets its grace to end; where the container's program has lost its senses, Modal ends it after
the margin and takes a while."""
STATES = {"timed-out": JobState.TIMED_OUT, "preempted": JobState.PREEMPTED, "stopped": JobState.CANCELLED}
"""By outcome (see `_answer`); else the exit code tells."""
ENDS = (exception.RemoteError, exception.InternalFailure, exception.ExecutionError, exception.DeserializationError)
"""What the client raises for a call that ended; its other errors are of the connection."""


class ModalExecutor:
    """The workspace that the token of this process belongs to (see executors/base.py for the contract)."""

    platform = PLATFORM

    def __init__(self) -> None:
        self._connection = Connection()
        self._runs: dict[str, Records] = {}

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        check_spec(spec)

    def log_in(self) -> None:
        token()

    def credentials(self) -> dict[str, str]:
        """Another machine's client works by them in the same workspace and environment."""
        self.log_in()
        names = ("token_id", "token_secret", "server_url", "environment")
        return {f"MODAL_{name.upper()}": config[name] for name in names if config[name]}

    def describe(self, spec: JobSpec) -> str:
        self.check(spec)
        env = " ".join(f"{name}={value}" for name, value in sorted({**spec.cache_env, **spec.env}.items()))
        shown = {**settings(spec), "env": env, "command": shlex.join(spec.command)}
        lines = [f"one call, {spec.name}, for {spec.timeout_s} s, of Modal app {object_name(spec.run)}-<hash of these>"]
        lines += [f"  {name:<22}{value}" for name, value in shown.items() if value]
        return spec.secrets.redact("\n".join(lines))

    def price(self, spec: JobSpec) -> Price:
        """By the second; `limits.unbounded` says what an hour's price leaves open."""
        return replace(modal_price(spec.resources), overrun_s=OVERRUN_S, unbounded=unbounded(spec.resources))

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
            "env": {**spec.cache_env, **spec.env},
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
        if answer is None or answer["outcome"] == "stopped":
            cancelled_at, end = records.get(job.id, "cancel"), records.get(job.id, "end")
            if end is not None and cancelled_at is None:
                if answer is None:
                    # Or Modal would start it again, to be told to go.
                    self._end(job, call)
                answer = end
            elif answer is not None:
                answer["ended_at"] = cancelled_at
        start = records.get(job.id, "start") or {}
        if answer is None:
            state, word = (JobState.RUNNING, f"running in {start['task']}") if start else (JobState.PENDING, "waiting")
            return JobStatus(state, message=f"{call_id}: {word}", started_at=start.get("started_at"))
        exit_code = answer.get("exit_code")
        state = STATES.get(answer["outcome"], JobState.SUCCEEDED if exit_code == 0 else JobState.FAILED)
        message = ": ".join(part for part in (call_id, answer["outcome"], answer.get("message")) if part)
        started_at = answer.get("started_at", start.get("started_at"))
        return JobStatus(state, exit_code, message, started_at, answer.get("ended_at"))

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        since, seen, rest = None, Counter[tuple[datetime, str]](), ""
        is_over = False
        while True:
            # Asked before the reading: what was written by then is read. Once more after the end, for what comes late.
            was_over, is_over = is_over, self.poll(job).state.final
            found = Counter[tuple[datetime, str]]()
            for entry in self._log_entries(job, since):
                key = (entry.timestamp, entry.message)
                found[key] += 1
                if found[key] > seen[key]:
                    *lines, rest = (rest + entry.message).split("\n")
                    yield from lines
            if found:
                since, seen = max(timestamp for timestamp, _ in found) - LATE, found
            if was_over or not (follow or is_over):
                break
            time.sleep(LOG_PAUSE_S)
        if rest:
            yield rest

    def cancel(self, job: Job) -> JobStatus:
        status = self.poll(job)
        if status.state.final:
            return status
        records = self._records(job.run)
        records.first(job.id, "cancel", time.time())
        # A call that nobody recorded yet finds this in its place, and goes.
        call_id = records.first(job.id, "call", NO_CALL)
        if call_id != NO_CALL:
            self._end(job, self._call(call_id))
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

    def _call(self, call_id: str) -> modal.FunctionCall:
        return modal.FunctionCall.from_id(call_id, client=self._connection.client)

    def _log_entries(self, job: Job, since: datetime | None) -> list[Any]:
        if not (call_id := self._call_id(job)):
            return []
        fetch, until = self._call(call_id).logs.fetch, datetime.now(UTC) + AHEAD
        # What the command says as errors is in it too (job_body.py), what Modal says of the container isn't.
        return self._connection.ask(f"log of {job.id}", lambda: list(fetch(since=since, until=until, source="stdout")))

    def _end(self, job: Job, call: modal.FunctionCall) -> None:
        self._connection.ask(f"end of a call of {job.id}", lambda: call.cancel(terminate_containers=True))


def _answer(call: modal.FunctionCall) -> dict[str, Any] | None:
    """What the container's program said of its end (job_body.run_job), else in the same form what Modal tells: None
    while the call goes on. What is no end of it is raised."""
    try:
        return call.get(timeout=0)
    except TimeoutError:
        return None
    except exception.FunctionTimeoutError as error:
        return {"outcome": "timed-out", "message": str(error)}
    except (Exception, SystemExit, exception.InputCancellation) as error:
        if isinstance(error, FAILURES) and not isinstance(error, ENDS):
            raise
        # The client gives the same error for a call that was stopped and for one whose container can't start, and
        # raises here what was raised there before our program could answer.
        inputs = call.get_call_graph() if isinstance(error, exception.RemoteError) else []
        is_stopped = any(each.status == modal.types.InputStatus.TERMINATED for each in inputs)
        if is_stopped or isinstance(error, exception.InputCancellation):
            return {"outcome": "stopped"}
        return {"outcome": "failed", "message": f"the container failed ({type(error).__name__}: {error})"}
