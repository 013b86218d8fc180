"""The log of a managed job: the command's lines alone, each once, however its streams break."""

from collections.abc import Iterator

import pytest

from composer_prime.errors import ExecutorError
from composer_prime.executors.base import Job, JobState, JobStatus
from composer_prime.executors.services import PAUSES_S, Busy
from composer_prime.executors.sky import SkyExecutor

PREFIX = "(demo--a--1, pid=7) "
FOOT = "\x1b[0m\x1b[32m✓ Job finished (status: SUCCEEDED).\x1b[0m\n"


def log(name: str, *lines: str, prefix: str = PREFIX, end: bool = True) -> str:
    framed = [f"composer-prime: log {name} begins", *lines, *([f"composer-prime: log {name} ends"] if end else [])]
    return "├── Waiting for task resources on 1 node.\n" + "".join(f"{prefix}{line}\n" for line in framed)


class Streams:
    """A server that sends these one after the other; an exception stands where one breaks."""

    def __init__(self, *streams: tuple[str | Exception, ...]) -> None:
        self.left = list(streams)

    def log(self, job: int, *, follow: bool) -> Iterator[bytes]:
        for part in self.left.pop(0):
            if isinstance(part, Exception):
                raise part
            yield part.encode()

    def state(self) -> JobState:
        return JobState.RUNNING if len(self.left) > 1 else JobState.SUCCEEDED


def read(streams: Streams, *, follow: bool = True) -> list[str]:
    """A job's lines, as the executor gives them."""
    executor = SkyExecutor("http://nowhere", resources={})
    executor.close()
    executor._api = streams  # type: ignore[assignment]
    executor.poll = lambda job: JobStatus(streams.state())  # type: ignore[method-assign]
    return list(executor.logs(Job("sky", "1", "demo", "a", 1), follow=follow))


def given(*streams: str) -> list[str]:
    return read(Streams(*((stream,) for stream in streams)))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda pause_s: None)


@pytest.mark.parametrize("prefix", [PREFIX, "", "\x1b[36m(demo, pid=7)\x1b[0m "])
def test_skypilots_own_words_are_left_out(prefix: str) -> None:
    heartbeat, rest = '<sky-payload>"<heartbeat>"</sky-payload>\n', "composer-prime: log 1-1 ends"
    text = heartbeat + log("1-1", "one", "", prefix=prefix, end=False) + heartbeat + f"{prefix}two\n{prefix}{rest}\n"
    assert given(text + FOOT) == ["one", "", "two"]


def test_a_last_line_without_its_end_is_parted_from_the_frame() -> None:
    assert given(log("1-1", "one", "twocomposer-prime: log 1-1 ends", end=False) + FOOT) == ["one", "two"]


def test_a_line_that_looks_like_another_logs_frame_is_a_line() -> None:
    assert given(log("1-1", "composer-prime: log 2-2 ends", "x")) == ["composer-prime: log 2-2 ends", "x"]


def test_a_stream_that_begins_anew_gives_only_what_is_new() -> None:
    assert given(log("1-1", "one", "one", end=False), log("1-1", "one", "one", "two")) == ["one", "one", "two"]


def test_a_recovered_jobs_log_begins_again_under_its_new_machine() -> None:
    other = log("2-2", "one", "two", prefix="(demo--a--1, pid=99) ")
    assert given(log("1-1", "one", end=False) + other) == ["one", "one", "two"]


def test_follow_takes_up_a_broken_stream_where_it_broke() -> None:
    head = log("1-1", "one", "two", end=False)
    whole = (head, f"{PREFIX}three\n", FOOT)
    streams = Streams((head[:-3], Busy("cut")), (Busy("refused"),), whole, whole)
    assert read(streams) == ["one", "two", "three"]


def test_follow_gives_up_when_nothing_new_comes_again_and_again() -> None:
    streams = Streams(*[(Busy("cut"),)] * (len(PAUSES_S) + 1))
    with pytest.raises(ExecutorError, match="cut"):
        read(streams)
    assert streams.left == []


def test_follow_reads_once_more_when_a_job_ended_while_its_stream_did() -> None:
    streams = Streams((log("1-1", "one", end=False),), (log("1-1", "one", "two"),))
    streams.state = iter([JobState.RUNNING, *[JobState.SUCCEEDED] * 9]).__next__  # type: ignore[method-assign]
    assert read(streams) == ["one", "two"]


def test_a_snapshot_that_breaks_is_read_again_without_doubles() -> None:
    head = log("1-1", "one", end=False)
    assert read(Streams((head, Busy("cut")), (head, f"{PREFIX}two\n")), follow=False) == ["one", "two"]
