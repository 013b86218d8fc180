"""Text that somebody else wrote, as it is safe to show: controls are spelled, and nothing is endless.

What members of a run put into its bucket reaches terminals and logs: a field may clear the screen, move the cursor, or
write lines that look like ours. Standard library only.
"""

import html
import json
import logging
import os
import sys
import threading
import traceback
import unicodedata
from types import TracebackType
from typing import IO, Any

from composer_prime.redaction import Redactor, leave_library_out, secret_values

MAX_CHARACTERS = 400
"""Of a text that is shown as one among others."""
MAX_MESSAGE = 20_000
"""Of an error's message, or a line of a log."""

REPEAT_S, MAX_COUNTED = 10.0, 64
"""Seconds in which equal messages are first counted, and how many different ones are at a time."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode's categories of controls, of marks that turn or join what is beside them, and of what ends a line."""


def visible(text: object, limit: int = MAX_CHARACTERS, *, lines: bool = False) -> str:
    """`str(text)` on one line, with what a terminal would act upon spelled as in Python's literals (`\\x1b`), and cut.

    limit   characters shown; of a longer text, its length is said
    lines   whether line ends and tabs stay as they are
    """
    whole = str(text)
    shown = "".join(_spelled(character, lines) for character in whole[:limit])
    return shown if len(whole) <= limit else f"{shown}... ({len(whole):,} characters)"


def _spelled(character: str, lines: bool) -> str:
    if (character.isascii() and character.isprintable()) or (lines and character in "\n\t"):
        return character
    if unicodedata.category(character) in _HIDDEN:
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return character


def shown(text: object, *, lines: bool = False) -> str:
    """A message as it may be printed or logged: visible, and without this environment's secrets."""
    return visible(Redactor(secret_values(os.environ)).text(str(text)), MAX_MESSAGE, lines=lines)


def markdown(text: object) -> str:
    """Text that somebody else wrote, in a report: no HTML, table, link or code of theirs."""
    return html.escape(visible(text), quote=False).translate(
        {ord("`"): "'"} | {ord(mark): f"\\{mark}" for mark in "|[]*"}
    )


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON in printable ASCII: `json.dumps` leaves one control character as it is."""
    return json.dumps(value, indent=indent).replace("\x7f", "\\u007f")


class VisibleFormatter(logging.Formatter):
    """A record's message on one line; a traceback behind it keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shown(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        return shown(super().formatException(ei), lines=True)  # type: ignore[arg-type]


def say(line: object, err: bool = False) -> None:
    """Print one line that may quote what others wrote, at once; on standard error if `err`."""
    print(shown(line), file=sys.stderr if err else sys.stdout, flush=True)


def guard_process() -> None:
    """Spell also what Python prints by itself: warnings of logs that nobody set up, and tracebacks."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())
    sys.excepthook = _show_traceback
    threading.excepthook = _show_thread_traceback


def _show_thread_traceback(of: threading.ExceptHookArgs) -> None:
    if of.exc_type is not SystemExit and of.exc_value is not None:
        _show_traceback(of.exc_type, of.exc_value, of.exc_traceback)


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    if issubclass(kind, KeyboardInterrupt):
        leave_library_out()
    print(shown(text, lines=True), end="", file=sys.stderr)


class CountingHandler(logging.StreamHandler):
    """Writes a message and counts those that are equal to it: it says how many after REPEAT_S, then after twice as long
    each time, or with a later message. Not at the end: a process's last line is its last word."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        super().__init__(stream)
        self._written: dict[tuple[str, str], tuple[logging.LogRecord, float, int]] = {}
        """By logger and message: the last record written, for how many seconds it stands, and how many came since."""

    def emit(self, record: logging.LogRecord) -> None:
        key, now = (record.name, record.getMessage()), record.created
        for other, (written, period, came) in list(self._written.items()):
            if other != key and (now - written.created > 2 * period or len(self._written) > MAX_COUNTED):
                self._say_count(written, came, now)
                del self._written[other]
        written, period, count = self._written.get(key, (None, REPEAT_S, 0))
        if written is None or record.exc_info:
            super().emit(record)
            self._written[key] = record, REPEAT_S, 0
        elif now - written.created < period:
            self._written[key] = written, period, count + 1
        else:
            self._say_count(written, count + 1, now)
            self._written[key] = record, 2 * period, 0

    def _say_count(self, written: logging.LogRecord, count: int, now: float) -> None:
        if count:
            text = f"{written.getMessage()} (repeated {count} times in {now - written.created:.0f} s)"
            super().emit(logging.makeLogRecord({**written.__dict__, "msg": text, "args": (), "created": now}))


def log_handler(stream: IO[str] | None = None) -> logging.Handler:
    """Writes log lines to a stream, standard error by default."""
    handler = CountingHandler(stream)
    handler.setFormatter(VisibleFormatter(LOG_FORMAT))
    return handler


def size(num_bytes: int) -> str:
    """Bytes for people: 1.72 MB."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = min((len(str(num_bytes)) - 1) // 3, len(units) - 1)
    return f"{num_bytes / 1000**power:.{2 if power else 0}f} {units[power]}"
