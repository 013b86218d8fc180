"""From an agent's log to a policy by the commands of the docs: a session of 200 turns, three teachers of which one
dies, a ceiling, and the same pairs and ledger wherever the commands are killed."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from composer_prime import metrics
from composer_prime.config.paths import models_cache
from composer_prime.metrics import read_tape
from composer_prime.sites.embedded.model import resolve_model
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.ledger import Record
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.pairs.file import read_decisions
from composer_prime.traces.states import Message, canonical, digest
from tests.architecture import REPOSITORY
from tests.traces.ask.text_teacher import FakeTextTeacher, serving
from tests.traces.ingest.claude_session import write

pytestmark = pytest.mark.slow

DOCS = REPOSITORY / "docs" / "traces.md"
NUM_TURNS = 200
NUM_BEFORE_DEATH = 60
CEILING_USD = 40.0
NUM_KILLS = 10
LONGEST = 8192
"""Tokens, which are bytes here."""


def says(mind: str, did: Mapping[str, Message]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What a teacher would do: with a third of the questions what the author did, with a third what all minds do, else
    what it alone does."""

    def say(body: Mapping[str, Any]) -> dict[str, Any]:
        place = int(digest(body["messages"])[:8], 16)
        if place % 3 == 0:
            return {
                name: value for name, value in did[canonical(body["messages"])].items() if name != "reasoning_content"
            }
        function = {
            "name": body["tools"][0]["function"]["name"],
            "arguments": json.dumps({"file_path": f"{place if place % 3 == 1 else mind}.py"}),
        }
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }

    return say


@dataclass
class Chain:
    """The three commands in a folder of their own, on one session and the same teachers."""

    folder: Path
    session: Path
    teachers: Path

    @property
    def store(self) -> Path:
        return self.folder / "traces"

    @property
    def answers(self) -> Path:
        return self.folder / "answers"

    @property
    def pairs(self) -> Path:
        return self.folder / "pairs.jsonl"

    def commands(self) -> list[list[str]]:
        ceiling = ["--ceiling-usd", str(CEILING_USD)]
        return [
            ["ingest", str(self.session), "--to", str(self.store)],
            ["ask", str(self.store), "--teachers", str(self.teachers), "--to", str(self.answers), *ceiling],
            ["pairs", str(self.store), str(self.answers), "--to", str(self.pairs)],
        ]

    def run(self, number: int, die_after_s: float | None = None) -> int:
        """One of the commands, killed after so long if it lasts; its exit code."""
        command = [sys.executable, "-m", "composer_prime.cli.main", "replay", *self.commands()[number]]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                return process.wait(die_after_s)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()

    def paid(self) -> list[Record]:
        """The ledger for each answer, without what differs between runs."""
        records = [one for one in AnswerFolder(self.answers).ledger() if one.outcome in ("answered", "unusable")]
        lasting = [replace(record, call="", at=0.0, latency_s=None) for record in records]
        return sorted(lasting, key=lambda record: record.key)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("session"), NUM_TURNS)


@pytest.fixture(scope="module")
def pool(session: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[FakeTextTeacher], Path]]:
    """Three teachers that serve; the third works for the first decision points only, and then hangs up on all."""
    folder = tmp_path_factory.mktemp("pool")
    Chain(folder, session, folder).run(0)
    did = {canonical(list(state.messages)): state.action for state in TraceStore(folder / "traces").states()}
    known = frozenset([*did][:NUM_BEFORE_DEATH])
    fakes = [FakeTextTeacher(says=says(name, did)) for name in ("one", "two", "three")]
    dying = fakes[2]
    dying.fault = lambda number: "ok" if canonical(dying.bodies[number]["messages"]) in known else "dead"
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(fake)) for fake in fakes]
        named = zip(fakes, urls, ("one", "two", "three"), strict=True)
        configs = [fake.config(url, name=name, max_in_flight=4) for fake, url, name in named]
        file = folder / "teachers.toml"
        file.write_text("".join(table(config.model_dump(exclude_none=True)) for config in configs))
        yield fakes, file


def table(settings: Mapping[str, Any]) -> str:
    return "[[teachers]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


@pytest.fixture(scope="module")
def calm(session: Path, pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Chain, list[float]]:
    """The chain undisturbed, and how long each command took."""
    chain, seconds = Chain(tmp_path_factory.mktemp("calm"), session, pool[1]), []
    for number, code in enumerate((0, 1, 0)):  # ask: some questions have no answer, because a teacher dropped out
        began = time.monotonic()
        assert chain.run(number) == code
        seconds.append(time.monotonic() - began)
    return chain, seconds


def test_every_turn_has_a_decision_and_some_agree_on_another_action(calm: tuple[Chain, list[float]]) -> None:
    chain, _ = calm
    states = list(TraceStore(chain.store).states())
    decisions = list(read_decisions(chain.pairs))
    otherwise = [one for one in decisions if one.chosen is not None]
    assert len(states) == NUM_TURNS and 30 < len(otherwise) < NUM_TURNS
    assert [one.state for one in decisions] == [state.id for state in states]
    assert {len(one.teachers) for one in otherwise} == {2, 3}


def test_ten_kills_end_with_the_same_pairs_and_ledger_under_the_ceiling(
    calm: tuple[Chain, list[float]], session: Path, pool: Any, tmp_path: Path
) -> None:
    fakes, teachers = pool
    undisturbed, seconds = calm
    chain, rng, kills = Chain(tmp_path, session, teachers), random.Random(5), 0
    served = sum(fake.served_usd for fake in fakes)
    while kills < NUM_KILLS:
        number = rng.choice((0, 1, 1, 2)) if chain.answers.exists() else min(kills, 1)
        kills += chain.run(number, seconds[number] * rng.random()) == -9
    for number in range(3):
        assert chain.run(number) == (1 if number == 1 else 0)
    served = sum(fake.served_usd for fake in fakes) - served
    assert chain.pairs.read_bytes() == undisturbed.pairs.read_bytes()
    assert chain.paid() == undisturbed.paid()
    records = AnswerFolder(chain.answers).ledger()
    settled = sum(record.usd_settled or 0 for record in records)
    lost = sum(record.usd_reserved for record in records if record.outcome == "lost")
    assert served <= settled + lost <= CEILING_USD


def test_a_policy_is_trained_by_the_commands_of_the_docs(session: Path, pool: Any, tmp_path: Path) -> None:
    blocks = [block.partition("\n```")[0] for block in DOCS.read_text().split("\n```")]
    files = {name: next(block for block in blocks if f"# {name}" in block) for name in ("teachers.toml", "logs.toml")}
    model = shutil.copytree(resolve_model("tiny", 0, models_cache()), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST}))
    shutil.copytree(session.parent, tmp_path / ".claude" / "projects" / "mine")
    with ExitStack() as stack:
        ours = {'"cuda"': '"cpu"', "Qwen/Qwen3-0.6B": str(model), "max_steps = 300": "max_steps = 2"}
        ours["\n[replay.pairs]"] = "\n[replay.pairs]\nbatch_size = 2"
        urls = ("http://127.0.0.1:8000", "http://127.0.0.1:8001", "https://openrouter.ai/api")
        for url, fake in zip(urls, pool[0], strict=True):
            ours[url] = stack.enter_context(serving(FakeTextTeacher(says=fake.says)))
        for name, text in files.items():
            for theirs, mine in ours.items():
                text = text.replace(theirs, mine)
            (tmp_path / name).write_text(text.partition("\n")[2])
        commands = next(block for block in blocks if "composer-prime run logs.toml" in block).partition("\n")[2]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "HOME": str(tmp_path), "PATH": path, "OPENROUTER_API_KEY": "a-key"}
        done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tape = list(read_tape(tmp_path / "outputs" / "logs" / "sites" / "a" / "metrics" / "orchestrator.jsonl"))
    assert len(tape) == 2
    assert all(record[metrics.PAIRS_COUNT] == 2 and record[metrics.AGREEMENT] >= 0 for record in tape)
    rows = [json.loads(line) for line in (tmp_path / "outputs" / "sft" / "train.jsonl").read_text().splitlines()]
    assert rows and all(row["prompt"] and len(row["completion"]) == 1 for row in rows)
