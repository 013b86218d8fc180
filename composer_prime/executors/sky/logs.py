"""The log of a managed job, each line of its command once: streams break, and a new one begins with the log's start.

The task's script (task.py) writes a line before and after the command. The first one names the log, which is another
one after each recovery, and shows what SkyPilot puts in front of each line.
"""

import re
from collections.abc import Iterator

from composer_prime.executors.local.executor import split_lines
from composer_prime.executors.sky.task import BEGINS, ENDS

_BEGINS = re.compile(re.escape(BEGINS.format("@")).replace("@", r"(\d+-\d+)") + "$")
_PAYLOAD = "<sky-payload>"
"""What moves the spinner of SkyPilot's own client."""


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
                text, end = line[len(prefix) :], ENDS.format(log)
                if text.endswith(end):
                    text, log = text.removesuffix(end), ""
                    if not text:
                        continue
                number += 1
                if number > self._count:
                    self._count = number
                    yield text
