"""Keeps secrets out of this process's own output, at its source: a platform's log never has them.

All output, that of children too, goes through a process of its own that runs redaction.py: it outlives a crash of ours.
"""

import atexit
import os
import subprocess
import sys
from contextlib import suppress

from composer_prime import redaction

DRAIN_S = 5.0
"""So long, at the end, processes that still hold the output may write: one that was left behind must not keep us."""


def redact_output() -> None:
    """From here to this process's end, Python's last words too, both outputs go to what is standard output now, without
    the values of our environment's secrets."""
    command = [sys.executable, "-I", redaction.__file__]
    redactor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert redactor.stdin is not None
    _direct_output(redactor.stdin.fileno())
    redactor.stdin.close()
    atexit.register(_end, redactor)


def _end(redactor: subprocess.Popen[bytes]) -> None:
    _direct_output(os.open(os.devnull, os.O_WRONLY))
    with suppress(subprocess.TimeoutExpired):
        redactor.wait(DRAIN_S)
    redactor.kill()


def _direct_output(to: int) -> None:
    for number, stream in enumerate((sys.stdout, sys.stderr), 1):
        stream.flush()
        os.dup2(to, number)
