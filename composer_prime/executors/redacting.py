"""Keeps secrets out of this process's own output, at its source: a platform's log never has them.

File descriptors 1 and 2 go through a pipe and a thread, so that children's output is covered too.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from composer_prime.executors.launching import SECRET_NAMES_VARIABLE
from composer_prime.executors.shim import Redactor

_CHUNK_BYTES = 1 << 16


@contextmanager
def redacted_output(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Within, both outputs go to what is standard output now, without the values of the secrets that we were given."""
    names = [name for name in environment.get(SECRET_NAMES_VARIABLE, "").split(",") if name]
    values = [environment[name] for name in names if environment.get(name)]
    if not values:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    reading, writing = os.pipe()
    thread = threading.Thread(target=_pump, args=(reading, saved[0], Redactor(values)), name="redaction")
    thread.start()
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(writing)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for kept, number in zip(saved, (1, 2), strict=True):
            os.dup2(kept, number)
        thread.join()  # ends when the last process that holds the pipe has ended
        os.close(reading)
        for kept in saved:
            os.close(kept)


def _pump(reading: int, output: int, redactor: Redactor) -> None:
    while data := os.read(reading, _CHUNK_BYTES):
        _write(output, redactor.feed(data))
    _write(output, redactor.flush())


def _write(output: int, data: bytes) -> None:
    while data:
        data = data[os.write(output, data) :]
