"""Keeps secrets out of this process's own output, at its source: a platform's log never has them.

File descriptors 1 and 2 go through a pipe and a thread, so that children's output is covered too.
"""

import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from composer_prime.errors import ComposerPrimeError
from composer_prime.redaction import Redactor, secret_values

DRAIN_S = 5.0
"""So long, at the end, processes that still hold the pipe may write: one that was left behind must not keep us."""
INTERRUPTED_EXIT = 130
_CHUNK_BYTES = 1 << 16


@contextmanager
def redacted_output(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Within, both outputs go to what is standard output now, without the values of the secrets that we were given.

    What is raised within is printed within, since nobody would redact it later: our own errors as one line, others with
    their traceback. Then SystemExit is raised, with the error's exit code.
    """
    redactor = Redactor(secret_values(environment))
    if not redactor.has_secrets:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    reading, writing = os.pipe()
    told, telling = os.pipe()
    pump = threading.Thread(target=_pump, args=(reading, told, saved[0], redactor), name="redaction", daemon=True)
    pump.start()
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(writing)
    try:
        with _errors_printed():
            yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for kept, number in zip(saved, (1, 2), strict=True):
            os.dup2(kept, number)
        os.write(telling, b".")
        pump.join(2 * DRAIN_S)  # an output that takes nothing must not keep us either
        if not pump.is_alive():
            for each in (*saved, told, telling):
                os.close(each)


@contextmanager
def _errors_printed() -> Iterator[None]:
    try:
        yield
    except ComposerPrimeError as error:
        print(f"composer-prime: {error}", file=sys.stderr)
        code = error.exit_code
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            raise
        print(end.code, file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = INTERRUPTED_EXIT
    except Exception:
        traceback.print_exc()
        code = 1
    else:
        return
    raise SystemExit(code)


def _pump(reading: int, told: int, output: int, redactor: Redactor) -> None:
    """Pass on what is written, until nobody can write any more; DRAIN_S at most after we are told to end."""
    try:
        with suppress(BrokenPipeError):  # who writes then is told so, as if we weren't between
            for data in _chunks(reading, told):
                _write(output, redactor.feed(data))
            _write(output, redactor.flush())
    finally:
        os.close(reading)


def _chunks(reading: int, told: int) -> Iterator[bytes]:
    until: float | None = None
    while until is None or time.monotonic() < until:
        watched = [reading] if until is not None else [reading, told]
        ready, _, _ = select.select(watched, [], [], None if until is None else max(0.0, until - time.monotonic()))
        if told in ready:
            until = time.monotonic() + DRAIN_S
        if reading in ready:
            data = os.read(reading, _CHUNK_BYTES)
            if not data:
                return
            yield data


def _write(output: int, data: bytes) -> None:
    while data:
        data = data[os.write(output, data) :]
