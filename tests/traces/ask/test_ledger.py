"""The ledger under a ceiling: on disk first, and never above."""

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from composer_prime.traces.ask.database import Database
from composer_prime.traces.ask.ledger import DOUBT, Ledger, Record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.sqlite"


def on_disk(path: Path) -> tuple[Record, ...]:
    with closing(Database(path, is_copy=True)) as database:
        return tuple(Ledger(database, 0).records())


@contextmanager
def opened(path: Path, ceiling: int) -> Iterator[Ledger]:
    with closing(Database(path)) as database:
        ledger = Ledger(database, ceiling)
        ledger.recover()
        database.commit()
        yield ledger


async def reserve(ledger: Ledger, key: str, amount: int) -> Record:
    record = await ledger.reserve(key, "a", "model", amount)
    assert record is not None
    return record


def test_calls_keep_the_order_in_which_they_were_sent_and_the_next_process_finds_the_same_sums(path: Path) -> None:
    async def run() -> tuple[int, int]:
        with opened(path, 1000) as ledger:
            first, second = await reserve(ledger, "one", 30), await reserve(ledger, "two", 40)
            await reserve(ledger, "three", 50)
            ledger.close_call(dataclasses.replace(second, outcome="answered", settled_nano_usd=7))
            ledger.close_call(dataclasses.replace(first, outcome="lost"))
            return ledger.settled, ledger.unsettled

    sums = asyncio.run(run())
    assert sums == (7, 80)
    with opened(path, 1000) as ledger:
        assert (ledger.settled, ledger.unsettled) == sums and [one.key for one in ledger.lost()] == ["one", "three"]
    assert [(one.key, one.outcome) for one in on_disk(path)] == [
        ("one", "lost"), ("two", "answered"), ("three", "lost")
    ]  # fmt: skip


def test_a_call_waits_for_those_in_flight_and_goes_when_they_were_cheap(path: Path) -> None:
    async def run() -> None:
        with opened(path, DOUBT * 40) as ledger:
            first = await reserve(ledger, "one", 30)
            second = asyncio.create_task(reserve(ledger, "two", 30))
            await asyncio.sleep(0)
            assert not second.done()
            ledger.close_call(dataclasses.replace(first, outcome="answered", settled_nano_usd=5))
            assert (await second).key == "two" and ledger.committed == 35

    asyncio.run(run())


def test_a_call_that_never_fits_is_refused_once_nothing_is_in_flight(path: Path) -> None:
    async def run() -> None:
        with opened(path, DOUBT * 40) as ledger:
            first = await reserve(ledger, "one", 30)
            second = asyncio.create_task(ledger.reserve("two", "a", "model", 30))
            await asyncio.sleep(0)
            assert not second.done()
            ledger.close_call(dataclasses.replace(first, outcome="lost"))
            assert await second is None
        assert [one.key for one in on_disk(path)] == ["one"]

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_charges_of_up_to_double_never_pass_the_ceiling_over_any_order_and_restart(path: Path, seed: int) -> None:
    draw, ceiling = random.Random(seed), 10_000
    charged = 0

    async def spend(ledger: Ledger) -> None:
        async def call(number: int, fate: str) -> None:
            nonlocal charged
            amount = draw.randrange(1, 800)
            record = await ledger.reserve(f"{number}", "a", "model", amount)
            if record is None:
                return
            await asyncio.sleep(0)
            cost = 0 if fate == "refused" else draw.randrange(2 * amount + 1)
            charged += cost
            assert charged <= ceiling and ledger.committed <= ceiling
            if fate == "lost":
                ledger.close_call(dataclasses.replace(record, outcome="lost"))
            elif fate != "killed":
                ledger.close_call(dataclasses.replace(record, outcome=fate, settled_nano_usd=cost))
            assert ledger.committed <= ceiling

        await asyncio.gather(*(call(number, draw.choice(["answered", "lost", "refused"])) for number in range(12)))
        await call(12, "killed")

    for _ in range(5):
        with opened(path, ceiling) as ledger:
            asyncio.run(spend(ledger))
    assert charged > 0
