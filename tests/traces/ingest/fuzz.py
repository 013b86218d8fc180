"""Broken sessions of every format: nothing but BadInput is raised, nothing is lost silently, what is kept comes back.

`python -m tests.traces.ingest.fuzz --sessions 10000`; `--first N --sessions 1` replays session N.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.export import atif_files, original_files
from composer_prime.traces.ingest.intake import find_files, read_file
from composer_prime.traces.ingest.reading import Reading
from composer_prime.traces.ingest.records import entries_of
from composer_prime.traces.ingest.secret_patterns import SecretCutter
from composer_prime.traces.ingest.session import Session
from tests.traces.ingest.stories import WRITERS, files_of
from tests.traces.ingest.test_export import Trajectory

NAMES = (*WRITERS, "claude-code", "claude-code", "codex")
"""Logs come oftener: more can be wrong with them."""
DEEP = "replaced by nested lists"
LOGS = ("claude-code", "codex", "claude-stream-json", "qwen-code", "openhands-v1")
WRONG = (None, True, 0, -1, 10**400, 1e308, "", "text", [], {}, [None], {"a": [1]}, "\ud800", "sk-ant-" + "a1" * 20)


def run_case(seed: int) -> str:
    """Break one session and read it; "refused", or the number of states. Raises AssertionError where it is unsound."""
    rng = random.Random(seed)
    name = rng.choice(NAMES)
    files = files_of(name, seed)
    mutations = MUTATIONS if name in LOGS or rng.random() < 0.2 else (_wrong_values,)  # a cut document is no JSON
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        file = rng.choice(list(files))
        files[file] = rng.choice(mutations)(rng, files[file])
    with tempfile.TemporaryDirectory() as folder:
        path = put(Path(folder) / "given", files)
        try:
            format, reading, _ = read_file(path)
        except BadInput as error:
            assert "\n" not in str(error)
            return "refused"
        check_sums(reading, Path(folder) / "given", format)
        check_originals(reading, Path(folder) / "given")
        for number, session in enumerate(reading.sessions):
            check_round_trip(session, format, Path(folder) / f"out{number}")
        return f"{format}: read" if reading.sessions else f"{format}: no decision point"


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder / next(iter(files))


def check_sums(reading: Reading, folder: Path, format: str) -> None:
    """Every record is in a node or counted, and there are as many as the files hold."""
    assert all(count > 0 for count in reading.dropped.values())
    if format in LOGS:
        files = [file.read_bytes() for file in folder.rglob("*.json*") if file.is_file()]
        assert reading.num_records == sum(len(entries_of(data, SecretCutter({}))) for data in files)
    if format in LOGS or len(reading.sessions) == 1:
        kept = {record for session in reading.sessions for node in session.nodes for record in node.records}
        assert len(kept) == reading.num_used
    assert reading.num_used + sum(reading.dropped.values()) == reading.num_records


def check_originals(reading: Reading, folder: Path) -> None:
    """What is kept stands in the files byte for byte, but for secrets and the end of a last line."""
    given = b"".join(file.read_bytes() + b"\n" for file in folder.rglob("*") if file.is_file())
    for session in reading.sessions:
        for part in session.original:
            for line in [part.text] if part.text.encode() in given else part.text.split("\n"):
                assert "[redacted]" in line or line.encode() in given


def check_round_trip(session: Session, format: str, folder: Path) -> None:
    """The same session comes of what is exported, and of what is stored."""
    stored = json.loads(json.dumps(session.to_json()))
    again = Session.of(stored)
    assert json.dumps(again.to_json()) == json.dumps(session.to_json()) and again.id == session.id
    for text in atif_files(session).values():
        Trajectory.model_validate_json(text).check()
    files = {name: text.encode() for name, text in original_files(session).items()}
    put(folder, files)
    (main,) = find_files([folder])
    _, reading, _ = read_file(main, format)
    same = [other for other in reading.sessions if other.id == session.id]
    assert same and json.dumps(same[0].to_json()) == json.dumps(session.to_json())
    assert json.dumps([s.messages for s in same[0].states()]) == json.dumps([s.messages for s in session.states()])


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _lose_bytes(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randrange(200) :]


def _noise(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice([b"\xff\xfe", b"\x00", b"\n", b'"', b"}", b"\\", "\u2028".encode()]) + data[at:]


def _swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    for _ in range(rng.randrange(1, 4)):
        if len(lines) > 1:
            a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


def _repeat_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    for _ in range(rng.randrange(1, 4)):
        if lines:
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"".join(lines)


def _lose_lines(rng: random.Random, data: bytes) -> bytes:
    return b"".join(line for line in data.splitlines(keepends=True) if rng.random() > 0.15)


def _wrong_values(rng: random.Random, data: bytes) -> bytes:
    """Values of JSON replaced by others: wrong types, nulls, huge numbers, lone surrogates, deep nesting."""

    def broken(text: bytes) -> bytes:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        for _ in range(rng.randrange(1, 3)):
            value = _break(rng, value)
        depth = rng.choice([30, 150, 5000])
        return json.dumps(value).replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode() + b"\n"

    whole = broken(data)
    if whole != data:
        return whole
    return b"".join(broken(line) if rng.random() < 0.1 else line for line in data.splitlines(keepends=True))


def _break(rng: random.Random, value: Any) -> Any:
    """The value with something in it replaced, lost, or taken from elsewhere in it."""
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        at = stack.pop()
        keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
        places += [(at, key) for key in keys]
        stack += [at[key] for key in keys]
    if not places:
        return deepcopy(rng.choice(WRONG))
    at, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del at[key]
    elif kind == 1:
        at[key] = DEEP
    elif kind == 2:
        other, there = rng.choice(places)
        at[key] = json.loads(json.dumps(other[there]))
    else:
        at[key] = deepcopy(rng.choice(WRONG))
    return value


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _cut, _lose_bytes, _noise, _swap_lines, _repeat_lines, _lose_lines, _wrong_values, _wrong_values, _wrong_values,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    found: Counter[str] = Counter()
    began = time.monotonic()
    for seed in range(given.first, given.first + given.sessions):
        try:
            found[run_case(seed)] += 1
        except Exception:
            print(f"session {seed} is unsound; replay it with --first {seed} --sessions 1", file=sys.stderr)
            raise
    print(f"{given.sessions:,} sessions in {time.monotonic() - began:.0f} s, all sound")
    for outcome, count in sorted(found.items()):
        print(f"{count:7,}  {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
