"""The log of a Hugging Face job, each line once: streams break, and every new one begins with the log's start.

Events carry a time, of which many lines may share one, and a later stream may begin later than the first one did. So
a line that was given already is known by its time and text, not by its number.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Protocol

from composer_prime.executors.base import JobState
from composer_prime.executors.hf_jobs.api import PAUSES_S, Busy

KEEP_ALIVE_S = 30
"""A stream without news says that it lives, so often."""
FOLLOW_SILENCE_S = 1.5 * KEEP_ALIVE_S
SNAPSHOT_SILENCE_S = 3.0
"""What a running job has printed is sent at once; then comes silence, which is waited for this long."""
SNAPSHOT_LEAST_S, SNAPSHOT_MOST_S = 2.0, 60.0
"""A job that is never silent is listened to for so long at least, until a line that is newer than the request, and at
most. Clocks differ between machines, so that newer lines alone decide nothing."""
SETTLING_S = 3.0
"""A job's stage changes a second or so after its last line."""

_STARTED = "===== Job started"
_DISORDER = timedelta(seconds=10)
"""Lines of several processes may come a little out of order."""


class Api(Protocol):
    """What is needed of the service."""

    def log_stream(self, name: str, silence_s: float) -> AbstractContextManager[Any]: ...


class Event(NamedTuple):
    """One line of a log."""

    at: datetime
    line: str


class Given:
    """Which events were given already, so that a log that begins anew can be taken up where it broke."""

    def __init__(self) -> None:
        self._recent: deque[Event] = deque()
        self._newest: datetime | None = None
        self._again: Counter[Event] = Counter()
        self._horizon: datetime | None = None

    def begin_again(self) -> None:
        """A new stream begins: everything that was given may come again."""
        self._again = Counter(self._recent)
        self._horizon = None if self._newest is None else self._newest - _DISORDER

    def is_new(self, event: Event) -> bool:
        """Whether the event is to be given; counts it as given then."""
        if self._horizon is not None and event.at < self._horizon:
            return False
        if self._again[event] > 0:
            self._again[event] -= 1
            return False
        self._recent.append(event)
        self._newest = event.at if self._newest is None else max(self._newest, event.at)
        while self._recent[0].at < self._newest - _DISORDER:
            self._recent.popleft()
        return True


def snapshot(api: Api, name: str, *, ended: bool) -> Iterator[str]:
    """The lines there are now. A job that has not `ended` is waited for no longer than a moment's silence."""
    given, silence_s = Given(), FOLLOW_SILENCE_S if ended else SNAPSHOT_SILENCE_S
    for pause_s in (*PAUSES_S, None):
        answered = False
        given.begin_again()
        try:
            with api.log_stream(name, silence_s) as response:
                answered = True
                is_enough = _enough(response)
                for event in _events(response.iter_lines()):
                    if not ended and is_enough(event):
                        return
                    if given.is_new(event):
                        yield event.line
            return
        except TimeoutError as error:
            if answered:  # all was sent that there is
                return
            silence_s *= 2
            problem = Busy(f"the log of {name} is not answered ({error})")
        except Busy as busy:
            problem = busy
        if pause_s is None:
            raise problem
        time.sleep(max(pause_s, problem.wait_s))


def follow(api: Api, name: str, state: Callable[[], JobState]) -> Iterator[str]:
    """All lines until the job's end. `state` asks the service how the job is.

    Raises ExecutorError when the service fails again and again with nothing new in between.
    """
    given, failures, quiet = Given(), 0, 0
    _wait_while_pending(state)
    while True:
        was_final = state().final  # asked before: what a stream of an ended job gives is all there will be
        given.begin_again()
        try:
            for line in _stream(api, name, given, state):
                failures = quiet = 0
                yield line
        except Busy as busy:
            if failures == len(PAUSES_S):
                raise
            time.sleep(max(PAUSES_S[failures], busy.wait_s))
            failures += 1
            continue
        if was_final:
            return
        failures, quiet = 0, quiet + 1
        _wait_for_end(state, at_most_s=min(quiet, 5) * SETTLING_S)


def _stream(api: Api, name: str, given: Given, state: Callable[[], JobState]) -> Iterator[str]:
    """New lines of one stream, until it ends, falls silent, or only says that it lives although the job has ended."""
    try:
        with api.log_stream(name, FOLLOW_SILENCE_S) as response:
            for event in _events(response.iter_lines(), is_over=lambda: state().final):
                if given.is_new(event):
                    yield event.line
    except TimeoutError:
        return


def _wait_while_pending(state: Callable[[], JobState]) -> None:
    pause_s = 0.25
    while state() is JobState.PENDING:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)


def _wait_for_end(state: Callable[[], JobState], *, at_most_s: float) -> None:
    deadline = time.monotonic() + at_most_s
    while time.monotonic() < deadline and not state().final:
        time.sleep(at_most_s / 6)


def _events(lines: Iterator[str], is_over: Callable[[], bool] = lambda: False) -> Iterator[Event]:
    """The events of a stream, less the service's own; `is_over` is asked at each sign of life without an event."""
    for line in lines:
        if line.startswith(":") and is_over():
            return
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if not event["data"].startswith(_STARTED):
            yield Event(datetime.fromisoformat(event["timestamp"]), event["data"])


def _enough(response: Any) -> Callable[[Event], bool]:
    """Whether an event of a stream, and so all after it, was printed after the stream had been asked for."""
    begun = time.monotonic()
    date = response.headers.get("date")
    asked_at = parsedate_to_datetime(date) + timedelta(seconds=1) if date else None  # it has no fractions

    def is_enough(event: Event) -> bool:
        heard_s = time.monotonic() - begun
        is_newer = asked_at is None or event.at > asked_at
        return heard_s > SNAPSHOT_MOST_S or (heard_s > SNAPSHOT_LEAST_S and is_newer)

    return is_enough
