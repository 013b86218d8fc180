"""From a job to SkyPilot's task, and from a managed job's record and log back to the job's status and lines.

SkyPilot gives managed jobs no time-out, so the task's script ends the command. It also frames the command's lines in
the log, since SkyPilot puts its own words before, after and in front of them.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, JobState, JobStatus, check_names, gpu_kinds, parse_name
from composer_prime.executors.local.executor import split_lines
from composer_prime.executors.local.shim import GRACE_S
from composer_prime.executors.repeating import first_line
from composer_prime.executors.unique_jobs import told_exit_code

RESOURCES_VARIABLE = "COMPOSER_PRIME_SKY_RESOURCES"
START_ALLOWANCE_S = 600
"""A job whose machine is there so soon after its launch has all of its time; waiting for longer shortens it."""
TEARDOWN_S = 600
OVERRUN_S = START_ALLOWANCE_S + round(GRACE_S) + TEARDOWN_S
"""Seconds that may be billed beyond a job's time: machines are billed while they start and until they are gone."""
TIMED_OUT = 124
"""The script's exit code after the job's time. SkyPilot tells no more of an end than the exit code."""
_BEGINS, _ENDS = "composer-prime: log {} begins", "composer-prime: log {} ends"
"""Names the log, which is another one after each recovery, and shows what SkyPilot puts in front of each line."""
_BEGUN = re.compile(re.escape(_BEGINS.format("@")).replace("@", r"(\d+-\d+)") + "$")
_PAYLOAD = "<sky-payload>"
"""Begins the lines that move the spinner of SkyPilot's own client."""
FIELDS = ("job_id", "job_name", "status", "schedule_state", "failure_reason", "start_at", "end_at")
"""The fields that are asked of a managed job's record."""

_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")
_NO_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON takes as they are, and YAML for the end of a line or for none."""
_STATES = {
    "PENDING": JobState.PENDING,
    "SUBMITTED": JobState.PENDING,
    "STARTING": JobState.PENDING,
    "RECOVERING": JobState.PENDING,
    "SUCCEEDED": JobState.SUCCEEDED,
    "CANCELLED": JobState.CANCELLED,
    **{f"FAILED{why}": JobState.FAILED for why in ("", "_SETUP", "_PRECHECKS", "_NO_RESOURCE", "_CONTROLLER")},
}

_SCRIPT = """\
exec </dev/null 2>/dev/null
log=$(date +%s%N)-$$
left=$(( {deadline} - $(date +%s) ))
[ "$left" -le {timeout_s} ] || left={timeout_s}
if [ "$left" -le 0 ]; then echo "composer-prime: no time left: its machine came too late"; exit {timed_out}; fi
echo "{begins}"
began=$SECONDS
timeout --kill-after={grace_s:g} "$left" {command} 2>&1
code=$?
echo "{ends}"
[ $(( SECONDS - began )) -ge "$left" ] && [ "$code" -ne 0 ] && code={timed_out}
exit "$code"
"""


def check_task(spec: JobSpec) -> None:
    """Refuse, with BadInput, what can be seen without asking the server."""
    check_names(spec)
    if not _NAME.fullmatch(spec.name) or parse_name(spec.name) != (spec.run, spec.site, spec.attempt):
        raise BadInput(
            f"run {spec.run} and site {spec.site} make the job's name {spec.name}, which SkyPilot can't hold or tell "
            "apart: both must end in a letter or digit and hold at most two of '.', '_', '-' in a row, the site no '--'"
        )


def resources_of(spec: JobSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """SkyPilot's `resources` of a job: what it asks for, over what is `given` for all jobs."""
    asked = spec.resources
    if "image_id" in given:
        raise BadInput(f"image_id ({given['image_id']}) in {RESOURCES_VARIABLE}: drop it, and name an image by --image")
    kinds = [f"{kind}:{asked.gpu_count or 1}" for kind in gpu_kinds(asked)]
    wanted = {
        "accelerators": kinds if len(kinds) > 1 else next(iter(kinds), None),
        "cpus": asked.cpus and f"{asked.cpus:g}+",
        "memory": asked.memory_gib and f"{asked.memory_gib:g}+",
        "disk_size": asked.disk_gib and round(asked.disk_gib),
        "image_id": spec.image and f"docker:{spec.image}",
        "infra": f"{asked.cloud or '*'}/{asked.region or '*'}" if asked.cloud or asked.region else None,
        "use_spot": False if asked.nonpreemptible else None,
    }
    return {**given, **{name: value for name, value in wanted.items() if value is not None}}


def task_of(spec: JobSpec, resources: Mapping[str, Any], now: float) -> str:
    """The task as YAML, which JSON is. now: Unix seconds."""
    task = {
        "name": spec.name,
        "resources": dict(resources),
        "envs": spec.variables,
        "secrets": spec.secrets.reveal(),
        "run": _SCRIPT.format(
            deadline=round(now) + spec.timeout_s + START_ALLOWANCE_S,
            timeout_s=spec.timeout_s,
            timed_out=TIMED_OUT,
            grace_s=GRACE_S,
            begins=_BEGINS.format("$log"),
            ends=_ENDS.format("$log"),
            command=shlex.join(spec.installing_command),
        ),
    }
    text = json.dumps(task, ensure_ascii=False)
    return _NO_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def status_of(record: Mapping[str, Any]) -> JobStatus:
    """A job's status by the managed job's record."""
    status, reason = str(record["status"]), record.get("failure_reason") or ""
    state = _STATES.get(status, JobState.RUNNING)  # a state nobody knows may be billed
    exit_code = 0 if state is JobState.SUCCEEDED else None
    if status == "FAILED" and (exit_code := told_exit_code(reason)) == TIMED_OUT:
        state, exit_code = JobState.TIMED_OUT, None
    message = f"{status}: {first_line(reason)}" if reason else status
    half = status == "PENDING" and record.get("schedule_state") == "INACTIVE"
    return JobStatus(state, exit_code, message, record.get("start_at"), record.get("end_at"), half)


def was_taken(record: Mapping[str, Any]) -> bool:
    """Whether SkyPilot ever took the job; else its launch failed, and what that left was cancelled."""
    return (record["status"], record.get("schedule_state")) != ("CANCELLED", "INACTIVE")


def command_lines(chunks: Iterator[bytes]) -> Iterator[tuple[str, str]]:
    """The command's lines in a stream from a log's start, each with its log's name."""
    log = prefix = ""
    for line in split_lines(chunks):
        if match := _BEGUN.search(line):
            log, prefix = match[1], line[: match.start()]
        elif log and line.startswith(prefix) and not line.startswith(_PAYLOAD):
            name, text, end = log, line.removeprefix(prefix), _ENDS.format(log)
            if text.endswith(end):
                text, log = text.removesuffix(end), ""
            if text or log:
                yield name, text
