"""A store of sessions: nothing twice, sound after a kill, and every decision point once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.errors import BadInput, CorruptObject
from composer_prime.traces.ingest.intake import FileReport, find_files, ingest
from composer_prime.traces.ingest.store import TraceStore
from tests.traces.ingest.claude_session import write
from tests.traces.ingest.stories import files_of


def put(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a session's files; the path of its main one."""
    files = files_of(name, seed)
    for file, data in files.items():
        path = folder / f"{name}-{seed}" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder / f"{name}-{seed}" / next(iter(files))


def into(store: Path, *paths: Path) -> list[FileReport]:
    return list(ingest(find_files(paths), TraceStore(store, is_new=True), named=paths))


def test_the_same_file_twice_adds_nothing(tmp_path: Path) -> None:
    path = put(tmp_path, "codex")
    (first,), (second,) = into(tmp_path / "store", path), into(tmp_path / "store", path)
    assert (first.num_new, second.num_new) == (1, 0) and second.num_states == first.num_states
    assert len(TraceStore(tmp_path / "store").ids()) == 1


@pytest.mark.parametrize("name", ["claude-code", "codex"])
def test_a_session_that_has_grown_gives_each_decision_point_once(name: str, tmp_path: Path) -> None:
    path = put(tmp_path, name)
    lines = path.read_bytes().splitlines(keepends=True)
    early = tmp_path / "early.jsonl"
    early.write_bytes(b"".join(lines[: len(lines) // 2]))
    (_,), (report,) = into(tmp_path / "store", early), into(tmp_path / "store", path)
    store = TraceStore(tmp_path / "store")
    assert report.num_copies >= 2 and len(store.ids()) == 2
    states = list(store.states())
    assert len(states) == report.num_states and {state.session for state in states} == {whole_id(store)}


def whole_id(store: TraceStore) -> str:
    return max(store.sessions(), key=lambda session: len(session.nodes)).id


def test_equal_rollouts_of_different_traces_all_count(tmp_path: Path) -> None:
    one = json.loads(files_of("verifiers", 0)["s.json"])["traces"][0]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps({**one, "id": id}) + "\n" for id in "ab"))
    (report,) = into(tmp_path / "store", tmp_path / "traces.jsonl")
    assert report.num_copies == 0
    assert len(list(TraceStore(tmp_path / "store").states())) == 2 * 6


def test_an_index_keeps_the_account_of_each_file(tmp_path: Path) -> None:
    path = put(tmp_path, "claude-code")
    (report,) = into(tmp_path / "store", path)
    account = json.loads((tmp_path / "store" / "index.json").read_bytes())["files"][str(path)]
    assert account["dropped"] == report.dropped and account["num_records"] == report.num_records
    assert account["sessions"] == TraceStore(tmp_path / "store").ids()


KILLED = """
import os, signal, sys
from pathlib import Path
from composer_prime.traces.ingest.intake import find_files, ingest
from composer_prime.traces.ingest.store import TraceStore
steps, left = ("fsync", "link", "replace", "unlink"), [int(sys.argv[1])]
def dying(real):
    def call(*given, **more):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **more)
    return call
for name in steps:
    setattr(os, name, dying(getattr(os, name)))
paths = [Path(sys.argv[2])]
list(ingest(find_files(paths), TraceStore(Path(sys.argv[3]), is_new=True), named=paths))
"""


@pytest.mark.parametrize("step", [1, 3, 5, 8, 14, 19])
def test_a_store_is_sound_after_a_kill_and_the_same_command_finishes_it(step: int, tmp_path: Path) -> None:
    logs, store = tmp_path / "logs", tmp_path / "store"
    for name in ("codex", "atif", "claude-code", "openai-chat"):
        put(logs, name)
    whole = tmp_path / "whole"
    into(whole, logs)
    done = subprocess.run([sys.executable, "-c", KILLED, str(step), str(logs), str(store)], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    if (store / "index.json").exists():
        assert {session.id for session in TraceStore(store).sessions()} <= set(TraceStore(whole).ids())
        assert set(TraceStore(store, is_new=True).index["sessions"]) == set(TraceStore(store).ids())
    into(store, logs)
    assert TraceStore(store).index == TraceStore(whole).index
    assert list(TraceStore(store).states()) == list(TraceStore(whole).states())


def test_a_folder_that_is_no_store_and_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match=r"is no store of traces .*: make one with `replay ingest`"):
        TraceStore(tmp_path, is_new=True)
    with pytest.raises(BadInput, match="is no store of traces"):
        TraceStore(tmp_path / "nothing")
    (tmp_path / "index.json").write_text('{"version": 9}')
    with pytest.raises(BadInput, match="has version 9; this program reads 2: ingest the files once more"):
        TraceStore(tmp_path)


def test_a_damaged_session_is_named_with_its_remedy(tmp_path: Path) -> None:
    into(tmp_path / "store", write(tmp_path / "logs"))
    store = TraceStore(tmp_path / "store")
    (tmp_path / "store" / "sessions" / f"{store.ids()[0]}.json.zst").write_bytes(b"x")
    with pytest.raises(CorruptObject, match=r"isn't a session .*: delete it and ingest its file again"):
        list(store.states())
