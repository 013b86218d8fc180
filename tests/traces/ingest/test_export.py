"""Sessions out of a store: byte for byte as they came, and as ATIF."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.export import export
from composer_prime.traces.ingest.intake import find_files, ingest, read_file
from composer_prime.traces.ingest.session import Session
from composer_prime.traces.ingest.store import TraceStore
from tests.traces.ingest.claude_session import claude_session, write
from tests.traces.ingest.stories import WRITERS, files_of
from tests.traces.ingest.test_store import into, put


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ToolCall(Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class Result(Strict):
    source_call_id: str | None = None
    content: str | None = None


class Observation(Strict):
    results: list[Result]


class Metrics(Strict):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Step(Strict):
    step_id: int = Field(ge=1)
    source: Literal["system", "user", "agent"]
    message: str
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None


class Agent(Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class Trajectory(Strict):
    """ATIF 1.7 as its own models check it: no other fields, steps numbered from 1, results of the step's own calls."""

    schema_version: Literal["ATIF-v1.7"]
    session_id: str
    trajectory_id: str
    agent: Agent
    steps: list[Step] = Field(min_length=1)
    extra: dict[str, Any] | None = None

    def check(self) -> None:
        assert [step.step_id for step in self.steps] == list(range(1, len(self.steps) + 1))
        for step in self.steps:
            made = {call.tool_call_id for call in step.tool_calls or []}
            seen = [result.source_call_id for result in (step.observation.results if step.observation else [])]
            assert set(seen) <= made
            if step.source != "agent":
                assert step.tool_calls is None and step.reasoning_content is None and step.metrics is None


def stored(tmp_path: Path, name: str) -> TraceStore:
    into(tmp_path / "store", put(tmp_path, name))
    return TraceStore(tmp_path / "store")


@pytest.mark.parametrize("name", [*WRITERS, "claude-code"])
def test_an_original_ingested_again_is_the_same_session(name: str, tmp_path: Path) -> None:
    store = stored(tmp_path, name)
    export(store, tmp_path / "out", "original")
    into(tmp_path / "again", tmp_path / "out")
    again = TraceStore(tmp_path / "again")
    assert again.ids() == store.ids()
    for session in store.sessions():
        assert again.session(session.id) == session
    assert list(again.states()) == list(store.states())


LINES = ("codex", "claude-stream-json", "qwen-code", "langsmith")
"""Lines that hold nothing aren't stored."""


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in LINES])
def test_a_document_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    export(stored(tmp_path, name), tmp_path / "out", "original")
    (file,) = (tmp_path / "out").iterdir()
    assert file.read_bytes() == files_of(name, 0)["s.json"]


def test_the_kept_lines_of_a_log_come_back_byte_for_byte_and_in_order(tmp_path: Path) -> None:
    store = stored(tmp_path, "claude-code")
    export(store, tmp_path / "out", "original")
    (main,) = (tmp_path / "out").glob("*.jsonl")
    given = claude_session(30, 0)
    kept = main.read_bytes().splitlines(keepends=True)
    rest = iter(given.main.splitlines(keepends=True))
    cut = [line for line in kept if b"[redacted]" not in line]
    assert len(kept) - len(cut) <= 1 and all(line in rest for line in cut)
    (subagent,) = (tmp_path / "out" / main.stem / "subagents").iterdir()
    assert subagent.read_bytes() == given.subagents[subagent.name]
    num_links = given.dropped["progress line"] + given.dropped["system line"]
    num_used = given.num_records - given.dropped.total()
    assert num_links == 2 and len(kept) == num_used + num_links - len(subagent.read_bytes().splitlines())


def test_an_episode_of_two_traces_is_written_once(tmp_path: Path) -> None:
    episode = json.loads(files_of("verifiers", 0)["s.json"])
    episode["traces"].append({**episode["traces"][0], "id": "t2"})
    (tmp_path / "traces.jsonl").write_text(json.dumps(episode) + "\n")
    into(tmp_path / "store", tmp_path / "traces.jsonl")
    assert export(TraceStore(tmp_path / "store"), tmp_path / "out", "original") == 1
    into(tmp_path / "again", tmp_path / "out")
    assert TraceStore(tmp_path / "again").ids() == TraceStore(tmp_path / "store").ids()


def test_a_trials_reward_goes_out_beside_its_trajectory(tmp_path: Path) -> None:
    trial = tmp_path / "logs"
    (trial / "agent").mkdir(parents=True)
    (trial / "verifier").mkdir()
    (trial / "agent" / "trajectory.json").write_bytes(files_of("atif", 0)["s.json"])
    (trial / "verifier" / "reward.txt").write_text("1.0\n")
    into(tmp_path / "store", trial)
    store = TraceStore(tmp_path / "store")
    export(store, tmp_path / "out", "original")
    into(tmp_path / "again", tmp_path / "out")
    assert list(TraceStore(tmp_path / "again").sessions()) == list(store.sessions())
    assert [session.reward for session in store.sessions()] == [1.0]


@pytest.mark.parametrize("name", [*WRITERS, "claude-code"])
def test_atif_passes_a_strict_check_and_tells_each_decision_point_once(name: str, tmp_path: Path) -> None:
    store = stored(tmp_path, name)
    export(store, tmp_path / "out", "atif")
    told: list[Any] = []
    for file in sorted((tmp_path / "out").iterdir(), key=lambda path: int(path.stem.split("-")[-1])):
        Trajectory.model_validate_json(file.read_bytes()).check()
        (session,) = read_file(file)[1].sessions or [None]
        told += [] if session is None else done(session)
    assert sorted(told) == sorted(line for session in store.sessions() for line in done(session))


def done(session: Session) -> list[str]:
    """Of each decision point, what was seen and done; usage, ids and inferred tools aside."""
    return [json.dumps([list(state.messages), dict(state.action), list(session.tools)]) for state in session.states()]


def test_each_branch_of_a_session_is_a_file_of_atif(tmp_path: Path) -> None:
    main = write(tmp_path / "logs")
    list(ingest(find_files([main]), TraceStore(tmp_path / "store", is_new=True), named=[main]))
    store = TraceStore(tmp_path / "store")
    (session,) = store.sessions()
    leaves = set(range(len(session.nodes))) - {node.parent for node in session.nodes}
    assert export(store, tmp_path / "out", "atif") == len(leaves) > 3


def test_export_refuses_an_unknown_kind_and_a_folder_that_holds_something(tmp_path: Path) -> None:
    store = stored(tmp_path, "codex")
    with pytest.raises(BadInput, match="can't be exported as 'csv': give one of original, atif"):
        export(store, tmp_path / "out", "csv")
    with pytest.raises(BadInput, match="holds something already: give a new folder"):
        export(store, tmp_path, "atif")
