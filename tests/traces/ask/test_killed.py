"""Real processes that ask, killed with SIGKILL at seeded places: the same answers and the same ledger in the end."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.answers import Answer
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.ledger import Record
from tests.architecture import REPOSITORY
from tests.traces.ask.conftest import DieAt, Serve
from tests.traces.ask.text_teacher import FakeTextTeacher, call

NUM_STATES = 20
CEILING_USD = 2.0


class Asker:
    """Starts processes that ask the same of the same teachers."""

    def __init__(self, folder: Path, teachers: list[TextTeacher], ceiling_usd: float = CEILING_USD) -> None:
        self.folder = AnswerFolder(folder)
        self.pid: int | None = None
        self._plan: dict[str, Any] = {
            "states": list(range(NUM_STATES)),
            "teachers": [teacher.model_dump() for teacher in teachers],
            "folder": str(folder),
            "ceiling_usd": ceiling_usd,
        }

    def run(self, env: Mapping[str, str] | None = None) -> int:
        """Ask until the process ends; its exit code."""
        command = [sys.executable, "-m", "tests.traces.ask.asker", json.dumps(self._plan)]
        with subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            self.pid = int(process.stdout.readline())
            return process.wait()

    def kill(self) -> None:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)


def what_answers_cost(folder: AnswerFolder) -> list[Record]:
    """The ledger for each answer, without what differs between runs."""
    answered = [record for record in folder.ledger() if record.outcome in ("answered", "unusable")]
    lasting = [dataclasses.replace(record, call="", at=0.0, latency_s=None) for record in answered]
    return sorted(lasting, key=lambda record: record.key)


def assert_as_undisturbed(disturbed: Asker, calm: Asker, fakes: list[FakeTextTeacher]) -> None:
    """The answers and their cost are those of a run that nobody killed, and all that was served is accounted for."""
    assert disturbed.run() == 0
    served, arrived = sum(fake.served_usd for fake in fakes), {call for fake in fakes for call in fake.costs}
    assert calm.run() == 0
    assert list(disturbed.folder.answers()) == list(calm.folder.answers())
    assert len(list(calm.folder.answers())) > NUM_STATES
    assert what_answers_cost(disturbed.folder) == what_answers_cost(calm.folder)
    records = disturbed.folder.ledger()
    assert arrived <= {record.call for record in records}
    answered = [record.key for record in records if record.outcome == "answered"]
    assert len(set(answered)) == len(answered), "asked again although its answer was stored"
    lost = [record for record in records if record.outcome == "lost"]
    assert {record.outcome for record in records} <= {"answered", "lost"}
    paid = sum(record.usd_settled or 0 for record in records) + sum(record.usd_reserved for record in lost)
    assert served <= paid <= CEILING_USD


def pool(serve: Serve) -> tuple[list[FakeTextTeacher], list[TextTeacher]]:
    """Two cheap teachers that don't always agree, and a dear one."""
    fakes = [FakeTextTeacher(), FakeTextTeacher(says=lambda body: call("a")), FakeTextTeacher()]
    tiers = {"one": 0, "other": 0, "dear": 1}
    named = zip(fakes, tiers.items(), strict=True)
    return fakes, [serve(fake, name=name, tier=tier, max_in_flight=2) for fake, (name, tier) in named]


@pytest.mark.slow
def test_ten_kills_at_any_byte_that_is_written_end_with_the_same_answers_and_ledger(
    serve: Serve, tmp_path: Path, die_at: DieAt
) -> None:
    fakes, teachers = pool(serve)
    draw, asker = random.Random(0), Asker(tmp_path / "killed", teachers)
    stored: dict[tuple[str, str], Answer] = {}
    for place in [0, *(draw.randrange(150) for _ in range(9))]:
        assert asker.run(die_at(place, draw.random())) == -signal.SIGKILL
        now = {(one.state, one.teacher): one for one in asker.folder.answers()}
        assert stored.items() <= now.items()
        stored = now
    assert stored
    assert_as_undisturbed(asker, Asker(tmp_path / "calm", teachers), fakes)


@pytest.mark.slow
def test_kills_while_requests_are_on_their_way_leave_them_visible_as_lost(serve: Serve, tmp_path: Path) -> None:
    fakes, teachers = pool(serve)
    draw, asker = random.Random(1), Asker(tmp_path / "killed", teachers)
    for _ in range(5):
        victim = draw.choice(fakes[:2])
        place, moment = len(victim.bodies) + draw.randrange(2), draw.choice(["before", "after"])

        def shoot(number: int, when: str, place: int = place, moment: str = moment) -> None:
            if (number, when) == (place, moment):
                asker.kill()

        victim.hook = shoot
        assert asker.run() == -signal.SIGKILL
        victim.hook = lambda number, when: None
    asker_lost = sum(record.outcome in ("reserved", "lost") for record in asker.folder.ledger())
    assert asker_lost >= 5
    assert_as_undisturbed(asker, Asker(tmp_path / "calm", teachers), fakes)


@pytest.mark.slow
def test_kills_never_let_servers_serve_more_than_the_ceiling(serve: Serve, tmp_path: Path) -> None:
    """Ever again killed right after the answer was made and charged, with all tokens taken that may be."""
    fake = FakeTextTeacher(is_greedy=True)
    teacher = serve(fake, max_in_flight=3)
    ceiling = 0.06
    asker = Asker(tmp_path / "answers", [teacher], ceiling)
    fake.hook = lambda number, when: asker.kill() if when == "after" else None
    codes = [asker.run() for _ in range(10)]
    assert codes[0] == -signal.SIGKILL and codes[-1] != -signal.SIGKILL  # the ceiling has ended it
    assert 0 < fake.served_usd <= ceiling
