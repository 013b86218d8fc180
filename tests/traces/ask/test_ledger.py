"""The ledger under a ceiling: on disk first, never above, and whole after a kill at any byte."""

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.ask.ledger import DOUBT, CeilingReached, Ledger, Record, Totals, read_record
from composer_prime.traces.ask.lines import LineWriter, read_lines
from composer_prime.traces.ask.prices import usd


def on_disk(path: Path) -> tuple[Record, ...]:
    return tuple({one.call: one for one in (read_record(line) for _, line in read_lines(path))}.values())


@contextmanager
def opened(path: Path, ceiling: int) -> Iterator[Ledger]:
    with closing(LineWriter(path)) as writer:
        yield Ledger(writer, Totals(on_disk(path)), ceiling)


def reserve(path: Path, key: str, amount: int) -> Record:
    with opened(path, 1000) as ledger:
        return asyncio.run(ledger.reserve(key, "a", "model", amount))


def test_a_reservation_is_on_the_disk_when_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    record = reserve(path, "key", 30)
    assert on_disk(path) == (record,)
    assert (record.outcome, record.usd_reserved, record.usd_settled) == ("reserved", usd(30), None)


def test_a_call_waits_for_those_in_flight_and_goes_when_they_were_cheap(tmp_path: Path) -> None:
    async def run() -> None:
        with opened(tmp_path / "ledger.jsonl", DOUBT * 40) as ledger:
            first = await ledger.reserve("one", "a", "model", 30)
            second = asyncio.create_task(ledger.reserve("two", "a", "model", 30))
            await asyncio.sleep(0)
            assert not second.done()
            await ledger.close_call(dataclasses.replace(first, outcome="answered", usd_settled=usd(5)))
            assert (await second).key == "two" and ledger.committed == 35

    asyncio.run(run())


def test_a_call_that_never_fits_is_refused_once_nothing_is_in_flight(tmp_path: Path) -> None:
    async def run() -> None:
        with opened(tmp_path / "ledger.jsonl", DOUBT * 40) as ledger:
            first = await ledger.reserve("one", "a", "model", 30)
            second = asyncio.create_task(ledger.reserve("two", "a", "model", 30))
            await asyncio.sleep(0)
            await ledger.close_call(dataclasses.replace(first, outcome="lost"))
            with pytest.raises(CeilingReached):
                await second

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_charges_of_up_to_double_never_pass_the_ceiling_over_any_order_and_restart(tmp_path: Path, seed: int) -> None:
    draw, path, ceiling = random.Random(seed), tmp_path / "ledger.jsonl", 10_000
    charged = 0

    async def spend(ledger: Ledger) -> None:
        async def call(number: int, fate: str) -> None:
            nonlocal charged
            amount = draw.randrange(1, 800)
            try:
                record = await ledger.reserve(f"{number}", "a", "model", amount)
            except CeilingReached:
                return
            await asyncio.sleep(0)
            cost = 0 if fate == "refused" else draw.randrange(2 * amount + 1)
            charged += cost
            assert charged <= ceiling and ledger.committed <= ceiling
            if fate == "lost":
                await ledger.close_call(dataclasses.replace(record, outcome="lost"))
            elif fate != "killed":
                await ledger.close_call(dataclasses.replace(record, outcome=fate, usd_settled=usd(cost)))
            assert ledger.committed <= ceiling

        ledger.recover({}, ())
        await asyncio.gather(*(call(number, draw.choice(["answered", "lost", "refused"])) for number in range(12)))
        await call(12, "killed")

    for _ in range(5):
        with opened(path, ceiling) as ledger:
            asyncio.run(spend(ledger))
    assert charged > 0


def test_a_line_that_was_torn_at_any_byte_never_happened(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    reserve(path, "one", 30)
    whole = path.read_bytes()
    reserve(path, "two", 40)
    both = path.read_bytes()
    for cut in range(len(whole), len(both)):
        path.write_bytes(both[:cut])
        assert [record.key for record in on_disk(path)] == ["one"]
        with opened(path, 1000) as ledger:
            assert ledger.committed == 30
        assert path.read_bytes() == whole
    path.write_bytes(both)
    with opened(path, 1000) as ledger:
        assert ledger.committed == 70


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"a": 1}\nno\n')
    with pytest.raises(BadInput, match="line 2 isn't a JSON object"):
        list(read_lines(path))
    with pytest.raises(BadInput, match="isn't one of ours"):
        read_record({"a": 1})
