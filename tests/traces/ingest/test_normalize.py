"""`composer-prime replay normalize`: near-duplicate sessions stay out of a copy, and nothing else does."""

import json
import os
import sys
from pathlib import Path

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.normalize import normalize
from composer_prime.traces.ingest.store import TraceStore
from tests.traces.ingest.test_commands import command

REAL = os.environ.get("DJ_PROCESS")
FAKE = """#!{python}
import json, os, pathlib, sys
config = json.loads(pathlib.Path(sys.argv[2]).read_text())
assert [name for step in config["process"] for name in step][-1] == "document_minhash_deduplicator"
rows, seen = [], []
for line in pathlib.Path(config["dataset_path"]).read_text().splitlines():
    row = json.loads(line)
    words = set(row["text"].lower().split())
    if all(len(words & other) < 0.7 * len(words | other) for other in seen):
        seen.append(words)
        rows.append(line)
cache = pathlib.Path(config.get("ds_cache_dir") or os.environ["HF_DATASETS_CACHE"])
cache.mkdir(parents=True, exist_ok=True)
(cache / "texts").write_text("".join(rows))
{then}
kept = pathlib.Path(config["export_path"])
kept.parent.mkdir()
kept.write_text("".join(row + "\\n" for row in rows))
"""


def fake(tmp_path: Path, then: str = "") -> Path:
    """A command that does what data-juicer's does, on words in place of runs of words."""
    path = tmp_path / "dj-process"
    path.write_text(FAKE.format(python=sys.executable, then=then))
    path.chmod(0o755)
    return path


def chat(number: int, last: str) -> list[dict[str, object]]:
    """A session that reads and repairs one module."""
    messages: list[dict[str, object]] = [
        {"role": "user", "content": f"Repair module {number}, and say what came of it."}
    ]
    for place in range(6):
        arguments = json.dumps({"path": f"source/part_{number}_{place}.py"})
        made = {"id": str(place), "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [made]})
        said = f"def part_{number}_{place}(): return {number * place}"
        messages.append({"role": "tool", "tool_call_id": str(place), "content": said})
    return [*messages, {"role": "assistant", "content": last}]


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    """Two modules, one of them repaired twice in nearly the same words, and two short sessions."""
    greetings = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": word}] for word in ("ho", "hey")]
    chats = [chat(1, "Done."), chat(1, "Done now, thank you."), chat(2, "Done."), *greetings]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    command("ingest", tmp_path / "chats.jsonl", "--to", tmp_path / "store")
    return TraceStore(tmp_path / "store")


@pytest.mark.parametrize(
    "kind", ["fake", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="DJ_PROCESS"))]
)
def test_near_duplicates_stay_out_and_the_longest_of_them_stays(
    store: TraceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    before = {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()}
    program = fake(tmp_path) if kind == "fake" else Path(str(REAL))
    shown = command("normalize", store.folder, "--to", tmp_path / "copy", "--dj-process", program).output
    assert "sessions         5" in shown and "near-duplicates  1, left out" in shown and "too short        2" in shown
    assert not cache.exists(), "data-juicer's copies of the texts are gone with its folder"
    copy = TraceStore(tmp_path / "copy")
    ends = sorted(str(session.nodes[-1].message["content"]) for session in copy.sessions())
    assert ends == ["Done now, thank you.", "Done.", "hey", "ho"]
    assert all(copy.session(id) == store.session(id) for id in copy.ids())
    assert len(list(copy.states())) == 6 + 1 + 6 + 1 + 2
    assert {path: path.read_bytes() for path in before} == before


def test_the_same_command_again_changes_nothing(store: TraceStore, tmp_path: Path) -> None:
    words = ("normalize", store.folder, "--to", tmp_path / "copy", "--dj-process", fake(tmp_path))
    first = command(*words).output
    before = {path: path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert command(*words).output == first
    assert {path: path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("raise SystemExit('no module named x')", r"ended with 1: no module named x"),
        ("sys.exit(0)", r"left no sessions that can be read .*: use version 1"),
        ('rows = [\'{"id": "someone"}\']', r"left 1 sessions, some not ours: use version 1"),
        ("rows = []", r"left 0 sessions"),
    ],
)
def test_what_data_juicer_does_else_is_one_line_and_copies_nothing(
    store: TraceStore, tmp_path: Path, then: str, told: str
) -> None:
    to = TraceStore(tmp_path / "copy", is_new=True)
    with pytest.raises(BadInput, match=told):
        normalize(store, to, fake(tmp_path, then))
    assert to.ids() == []


def test_a_store_is_not_its_own_copy(store: TraceStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.folder)
    with pytest.raises(BadInput, match=r"--to .* is the store itself"):
        normalize(store, TraceStore(tmp_path / "link", is_new=True), fake(tmp_path))


def test_without_data_juicer_the_way_to_it_is_told(store: TraceStore, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"can't be run \(No such file.*pip install py-data-juicer==1.6.1 scipy aiohttp`"
    ):
        normalize(store, TraceStore(tmp_path / "copy", is_new=True), tmp_path / "nowhere")
