"""What the stage and the message of a Hugging Face job mean.

The service tells how a job ended in words only. "Job timeout" and "Job failed with exit code: N. Reason: ..." are on
record. Its words for a machine that was taken back aren't known, so those of Kubernetes, which it runs on, stand in.
"""

import re
from datetime import datetime

from huggingface_hub import JobInfo

from composer_prime.executors.base import JobState, JobStatus

_STATES = {
    "SCHEDULING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "COMPLETED": JobState.SUCCEEDED,
    "CANCELED": JobState.CANCELLED,
    "DELETED": JobState.CANCELLED,
    "ERROR": JobState.FAILED,
}
_TIMED_OUT = re.compile(r"timed?[ -]?out|DeadlineExceeded", re.IGNORECASE)
_TAKEN_BACK = re.compile(
    r"preempt|evict|NodeLost|NodeShutdown|TerminationByKubelet|DeletionByTaintManager|reclaimed", re.IGNORECASE
)
_EXIT_CODE = re.compile(r"exit code:? (\d+)", re.IGNORECASE)


def status_of(info: JobInfo) -> JobStatus:
    """The job's status; an exit code above 128 is a signal, as containers have it."""
    stage, said = str(info.status.stage), info.status.message or ""
    state = _STATES.get(stage, JobState.RUNNING)  # a stage nobody knows may be billed
    exit_code = 0 if state is JobState.SUCCEEDED else None
    if state is JobState.FAILED:
        if _TAKEN_BACK.search(said):
            state = JobState.PREEMPTED
        elif _TIMED_OUT.search(said):
            state = JobState.TIMED_OUT
        elif match := _EXIT_CODE.search(said):
            exit_code = int(match[1])
            exit_code = 128 - exit_code if 128 < exit_code <= 192 else exit_code
    message = f"{stage}: {said}" if said else stage
    return JobStatus(state, exit_code, message, unix(info.started_at), unix(info.finished_at))


def unix(moment: datetime | None) -> float | None:
    """Unix seconds."""
    return None if moment is None else moment.timestamp()
