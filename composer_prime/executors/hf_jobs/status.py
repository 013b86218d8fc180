"""What the stage and the message of a Hugging Face job mean.

The service tells how a job ended in words only. "Job timeout" and "Job failed with exit code: N. Reason: ..." are on
record; for a machine that was taken back its words are not known, so that Kubernetes's, which it runs on, stand in.
"""

import re
from typing import TYPE_CHECKING

from composer_prime.executors.base import JobState, JobStatus

if TYPE_CHECKING:
    from datetime import datetime

    from huggingface_hub import JobInfo

_STATES = {
    "SCHEDULING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "COMPLETED": JobState.SUCCEEDED,
    "CANCELED": JobState.CANCELLED,
    "DELETED": JobState.CANCELLED,
}
_TIMED_OUT = re.compile(r"timed?[ -]?out|DeadlineExceeded", re.IGNORECASE)
_TAKEN_BACK = re.compile(
    r"preempt|evict|NodeLost|NodeShutdown|TerminationByKubelet|DeletionByTaintManager|reclaimed", re.IGNORECASE
)
_EXIT_CODE = re.compile(r"exit code:? (\d+)", re.IGNORECASE)
_SIGNAL_BASE = 128
"""A container ended by signal n has the exit code 128 + n."""


def status_of(info: "JobInfo") -> JobStatus:
    """The job's status; an exit code above 128 is a signal, as containers have it."""
    stage, said = str(info.status.stage), info.status.message
    state, exit_code = _STATES.get(stage, JobState.RUNNING), None  # a stage nobody knows may be billed
    if stage == "COMPLETED":
        exit_code = 0
    elif stage == "ERROR":
        state, exit_code = _cause(said or "")
    message = f"{stage}: {said}" if said else stage
    return JobStatus(state, exit_code, message, _unix(info.started_at), _unix(info.finished_at))


def is_final(info: "JobInfo") -> bool:
    """Whether nothing of the job runs any more."""
    return status_of(info).state.final


def _cause(said: str) -> tuple[JobState, int | None]:
    """State and exit code of a job in stage ERROR, of which the service tells in words only."""
    if _TAKEN_BACK.search(said):
        return JobState.PREEMPTED, None
    if _TIMED_OUT.search(said):
        return JobState.TIMED_OUT, None
    if match := _EXIT_CODE.search(said):
        code = int(match.group(1))
        return JobState.FAILED, -(code - _SIGNAL_BASE) if _SIGNAL_BASE < code <= _SIGNAL_BASE + 64 else code
    return JobState.FAILED, None


def _unix(moment: "datetime | None") -> float | None:
    return None if moment is None else moment.timestamp()
