"""The log of a managed job, each line of its command once: streams break, and a new one begins with the log's start.

The task's script (task.py) writes a line before and after the command. The first one names the log, which is another
one after each recovery, and shows what SkyPilot puts in front of each line.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from composer_prime.executors.base import JobState
from composer_prime.executors.local.executor import split_lines
from composer_prime.executors.repeating import PAUSES_S, Busy
from composer_prime.executors.sky.task import BEGINS, ENDS

LOOK_S = 1.0

_BEGINS = re.compile(re.escape(BEGINS.format("@")).replace("@", r"(\d+-\d+)") + "$")
_PAYLOAD = "<sky-payload>"
"""What moves the spinner of SkyPilot's own client."""


class Api(Protocol):
    """What is needed of the server."""

    def log_stream(self, job: int, *, follow: bool) -> AbstractContextManager[Iterator[bytes]]: ...


class Given:
    """How many lines of which log were given already."""

    def __init__(self) -> None:
        self._log, self._count = "", 0

    def new_lines(self, chunks: Iterator[bytes]) -> Iterator[str]:
        """The command's lines in a stream from a log's start, less those that were given."""
        log, prefix, number = "", "", 0
        for line in split_lines(chunks):
            if match := _BEGINS.search(line):
                log, prefix, number = match[1], line[: match.start()], 0
                if log != self._log:
                    self._log, self._count = log, 0
            elif log and line.startswith(prefix) and not line.startswith(_PAYLOAD):
                text = line[len(prefix) :]
                if is_last := text.endswith(ENDS.format(log)):
                    text = text.removesuffix(ENDS.format(log))
                    log = ""
                if is_last and not text:
                    continue
                number += 1
                if number > self._count:
                    self._count = number
                    yield text


def snapshot(api: Api, job: int) -> Iterator[str]:
    """The lines there are now, of a job that runs or has ended."""
    given = Given()
    for pause_s in (*PAUSES_S, None):
        try:
            with api.log_stream(job, follow=False) as chunks:
                yield from given.new_lines(chunks)
            return
        except Busy:
            if pause_s is None:
                raise
            time.sleep(pause_s)


def follow(api: Api, job: int, state: Callable[[], JobState]) -> Iterator[str]:
    """All lines until the job's end. `state` asks the server how the job is.

    Raises ExecutorError when the server fails again and again with nothing new in between.
    """
    given, failures = Given(), 0
    while True:
        was_final = state().final  # asked before: what a stream of an ended job gives is all there will be
        try:
            with api.log_stream(job, follow=True) as chunks:
                for line in given.new_lines(chunks):
                    failures = 0
                    yield line
        except Busy:
            if failures == len(PAUSES_S):
                raise
            time.sleep(PAUSES_S[failures])
            failures += 1
            continue
        if was_final:
            return
        failures = 0
        deadline = time.monotonic() + LOOK_S
        while time.monotonic() < deadline and not state().final:
            time.sleep(LOOK_S / 5)
