"""Logs of Hugging Face jobs through broken streams: each line once, in order, until the end."""

import random
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest

from composer_prime.errors import ExecutorError
from composer_prime.executors.base import Job, JobSpec, JobState
from composer_prime.executors.hf_jobs import logs as hf_jobs_logs
from composer_prime.executors.hf_jobs.logs import Event, Given
from tests.executors.jobs import wait_until
from tests.executors.loopback_hf_jobs import HfJobsPlatform

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HfJobsPlatform]:
    monkeypatch.setattr(hf_jobs_logs, "PAUSES_S", (0.01, 0.02, 0.04))
    monkeypatch.setattr(hf_jobs_logs, "SETTLING_S", 0.1)
    monkeypatch.setattr(hf_jobs_logs, "SNAPSHOT_SILENCE_S", 0.5)
    monkeypatch.setattr(hf_jobs_logs, "SNAPSHOT_LEAST_S", 0.3)
    loopback = HfJobsPlatform(tmp_path / "service")
    yield loopback
    loopback.close()


def start(service: HfJobsPlatform, code: str) -> Job:
    command = (sys.executable, "-uc", code)
    return service.executor().submit(JobSpec("demo", "a", 1, command, timeout_s=60))


def first_then_second(first: str, second: str, go: Path) -> str:
    """Code that does the first thing, and the second once there is a file at `go`."""
    return f"import pathlib, time\n{first}\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n{second}"


@pytest.mark.parametrize("cut_by", ["reset", "end"])
def test_every_line_comes_once_through_streams_that_break(
    service: HfJobsPlatform, tmp_path: Path, cut_by: Literal["reset", "end"]
) -> None:
    faults = service.log_faults
    faults.cuts, faults.cut_after, faults.cut_by = 3, 700, cut_by
    # many of one moment, and equal ones
    first, second = ("for n in range(0, 1500): print(n // 3)", "for n in range(1500, 3000): print(n // 3)")
    job = start(service, first_then_second(first, second, tmp_path / "go"))
    lines = service.executor().logs(job, follow=True)
    given = [next(lines) for _ in range(1500)]
    (tmp_path / "go").touch()
    assert [*given, *lines] == [str(n // 3) for n in range(3000)]
    assert faults.cuts == 0


def test_a_stream_that_begins_later_than_the_first_did_loses_nothing(service: HfJobsPlatform, tmp_path: Path) -> None:
    first, second = "for n in range(50): print(n)", "for n in range(50, 80): print(n)"
    job = start(service, first_then_second(first, second, tmp_path / "go"))
    faults = service.log_faults
    faults.cuts, faults.cut_after = 1, 50
    lines = service.executor().logs(job, follow=True)
    given = [next(lines) for _ in range(50)]
    faults.replay = 40
    (tmp_path / "go").touch()
    assert [*given, *lines] == [str(n) for n in range(80)]


def test_following_ends_with_the_job_even_if_the_stream_does_not(service: HfJobsPlatform) -> None:
    service.log_faults.is_endless, service.log_faults.keep_alive_s = True, 0.05
    job = start(service, "print('last')")
    assert list(service.executor().logs(job, follow=True)) == ["last"]


def test_following_waits_for_a_stage_that_lags(service: HfJobsPlatform) -> None:
    service.stage_lag_s = 0.5
    job = start(service, "print('last')")
    executor = service.executor()
    assert list(executor.logs(job, follow=True)) == ["last"]
    assert executor.poll(job).state is JobState.SUCCEEDED


def test_following_asks_for_no_log_until_a_pending_job_starts(service: HfJobsPlatform) -> None:
    lines: list[str] = []
    with service.hold_pending():
        job = start(service, "print('hello')")
        assert list(service.executor().logs(job)) == []
        reader = threading.Thread(target=lambda: lines.extend(service.executor().logs(job, follow=True)))
        reader.start()
        asked = len(service.requests)
        wait_until(lambda: len(service.requests) >= asked + 3, "the job's stage is asked for")
        assert not any(path.endswith("/logs") for _, path in service.requests)
    reader.join()
    assert lines == ["hello"]


def test_a_job_that_never_started_has_an_empty_log(service: HfJobsPlatform) -> None:
    executor = service.executor()
    with service.hold_pending():
        job = start(service, "print('hello')")
        executor.cancel(job)
    assert list(executor.logs(job)) == list(executor.logs(job, follow=True)) == []


def test_a_look_at_a_running_job_returns_however_much_it_prints(service: HfJobsPlatform) -> None:
    job = start(service, "import time\nwhile True: print('tick'); time.sleep(0.005)")
    lines = service.executor().logs(job, follow=True)
    assert next(lines) == "tick"
    looked = list(service.executor().logs(job))
    assert looked and set(looked) == {"tick"}


def test_a_look_at_a_silent_job_returns_what_it_has_printed(service: HfJobsPlatform) -> None:
    job = start(service, "import time; print('once'); time.sleep(60)")
    lines = service.executor().logs(job, follow=True)
    assert next(lines) == "once"
    assert list(service.executor().logs(job)) == ["once"]


def test_a_look_is_repeated_when_it_is_answered_late_or_not_at_all(service: HfJobsPlatform) -> None:
    job = start(service, "print('once')")
    executor = service.executor()
    assert list(executor.logs(job, follow=True)) == ["once"]
    service.troubles.extend([None, "503", "reset"])
    assert list(executor.logs(job)) == ["once"]
    running = start_second(service)
    service.troubles.extend([None, "slow"])
    assert list(executor.logs(running)) == ["twice"]


def start_second(service: HfJobsPlatform) -> Job:
    command = (sys.executable, "-uc", "import time; print('twice'); time.sleep(60)")
    job = service.executor().submit(JobSpec("demo", "b", 1, command, timeout_s=60))
    assert next(service.executor().logs(job, follow=True)) == "twice"
    return job


def test_a_service_that_gives_no_log_at_all_is_an_error(service: HfJobsPlatform) -> None:
    job = start(service, "import time; time.sleep(60)")
    lines = service.executor().logs(job, follow=True)
    service.log_faults.cuts, service.log_faults.cut_after = 1000, 0
    with pytest.raises(ExecutorError, match="no answer from http"):
        next(lines)


def events(*moments_ms: float) -> list[Event]:
    return [Event(NOON + timedelta(milliseconds=moment), f"line {number}") for number, moment in enumerate(moments_ms)]


def test_what_was_given_is_known_again_also_where_lines_are_out_of_order() -> None:
    given = Given()
    log = events(0, 5, 5, 5, 4, 3, 9000, 8999, 30_000, 29_000)
    assert [event for event in log[:8] if given.is_new(event)] == log[:8]
    given.begin_again()
    assert [event for event in log if given.is_new(event)] == log[8:]
    given.begin_again()
    assert [event for event in log if given.is_new(event)] == []


@pytest.mark.parametrize("seed", range(20))
def test_streams_that_break_anywhere_give_the_log_as_it_is(seed: int) -> None:
    dice = random.Random(seed)
    moments = sorted(dice.randrange(40_000) for _ in range(300))
    log = [Event(NOON + timedelta(milliseconds=moment), dice.choice("abc")) for moment in moments]
    given, taken = Given(), []
    while len(taken) < len(log):
        given.begin_again()
        seen = dice.randrange(len(taken), len(log) + 1)
        begin = dice.randrange(len(taken) + 1) if dice.random() < 0.5 else 0
        # a stream that begins later begins with a moment, not in the middle of one
        while 0 < begin < len(log) and log[begin].at == log[begin - 1].at:
            begin -= 1
        taken += [event for event in log[begin:seen] if given.is_new(event)]
    assert taken == log
