"""How fast a teacher is asked: limits that say nothing, limits that say how long, and a server that never lets go."""

import asyncio
import email.utils
import time
from collections import Counter
from collections.abc import Callable

import pytest

from composer_prime.traces.ask import pace
from composer_prime.traces.ask.pace import LONGEST_PAUSE_S, Pace, asked_pause
from tests.traces.ask.text_teacher import FakeTextTeacher, trace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Virtual seconds, which only sleeping lets pass."""
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(pace.asyncio, "sleep", sleep)
    monkeypatch.setattr(pace, "FIRST_PAUSE_S", 1.0)
    return lambda: now


def test_twenty_requests_a_window_of_ten_seconds_answer_all_of_199_without_a_word_of_the_server(clock):
    async def run() -> tuple[float, int]:
        mine, windows, num_refused, num_answered = Pace(clock), Counter[int](), 0, 0
        while num_answered < 199:
            left_at = await mine.turn()
            windows[int(clock() // 10)] += 1
            if windows[int(clock() // 10)] > 20:
                num_refused += 1
                assert mine.refused(left_at)
            else:
                num_answered += 1
                mine.answered()
            await pace.asyncio.sleep(0.05)
        return clock(), num_refused

    seconds, num_refused = asyncio.run(run())
    assert seconds < 2 * 100, f"{seconds} virtual seconds, and 100 are the least"
    assert num_refused < 60


def test_refusals_of_one_burst_slow_a_teacher_down_once(clock):
    async def run() -> None:
        mine = Pace(clock)
        left = [await mine.turn() for _ in range(8)]
        assert all([mine.refused(one) for one in left])
        await mine.turn()

    asyncio.run(run())
    assert clock() == 1.0


def test_a_server_that_refuses_for_ten_minutes_is_given_up(clock):
    async def run() -> None:
        mine = Pace(clock)
        while mine.refused(await mine.turn()):
            pass

    asyncio.run(run())
    assert LONGEST_PAUSE_S < clock() <= 3 * LONGEST_PAUSE_S


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "soon"}, None),
        ({"retry-after": email.utils.formatdate(1005, usegmt=True)}, 5),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "6m0s"}, None),
        ({"anthropic-ratelimit-tokens-remaining": "0", "anthropic-ratelimit-tokens-reset": "1970-01-01T00:16:50Z"}, 10),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1700000009000"}, 1700000009 - 1000),
    ],
)  # fmt: skip
def test_a_server_says_how_long_to_wait_in_many_ways(headers, seconds):
    assert asked_pause(headers, now=lambda: 1000.0) == (None if seconds is None else pytest.approx(seconds))


def test_a_server_with_windows_and_no_retry_after_answers_all_and_nothing_is_given_up(serve, asking):
    windows, start = Counter[int](), time.monotonic()

    def fault(number: int) -> str:
        window = int((time.monotonic() - start) / 0.25)
        windows[window] += 1
        return "ok" if windows[window] <= 5 else "busy"

    fake = FakeTextTeacher(fault=fault, retry_after=None)  # type: ignore[arg-type]
    report = asking([trace(number) for number in range(40)], [serve(fake)])
    assert report.teachers[0].num_answered == 40 and report.is_complete
    assert len(fake.bodies) > 40 and report.usd == pytest.approx(fake.served_usd)


def test_a_pause_that_is_too_long_stops_the_teacher_at_once(serve, asking):
    fake = FakeTextTeacher(fault=lambda number: "busy", retry_after="3600")
    report = asking([trace(number) for number in range(20)], [serve(fake)])
    assert len(fake.bodies) == 1 and "refuses for too long" in (report.teachers[0].stopped or "")
