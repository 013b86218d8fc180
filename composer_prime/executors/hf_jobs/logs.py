"""The log of a Hugging Face job, by the client's own following, which takes a broken stream up where it broke."""

import time
from collections.abc import Callable, Iterator

from composer_prime.executors.base import JobState
from composer_prime.executors.hf_jobs.api import JobsApi
from composer_prime.executors.repeating import PAUSES_S, Busy

LONGEST_PAUSE_S = 5.0


def lines(api: JobsApi, name: str, state: Callable[[], JobState], *, follow: bool) -> Iterator[str]:
    """The lines there are, with `follow` until the job's end. `state` asks the service how the job is.

    What the client doesn't repeat, a service that is busy, is asked again, and lines that were given are left out.
    Raises ExecutorError when it stays so with nothing new in between.
    """
    pause_s = 0.25
    while follow and state() is JobState.PENDING:  # the client would take its empty log for the whole
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    given = failures = 0
    while True:
        try:
            for place, line in enumerate(api.log(name, follow=follow)):
                if place >= given:
                    given, failures = given + 1, 0
                    yield line
            return
        except Busy as busy:
            if failures == len(PAUSES_S):
                raise
            time.sleep(max(PAUSES_S[failures], busy.wait_s))
            failures += 1
