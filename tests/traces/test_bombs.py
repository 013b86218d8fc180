"""Traces that somebody shares hold what they hold, and not what a few bytes of zstd may state or become."""

import os
import resource
from pathlib import Path

import pytest
import zstandard

from composer_prime.errors import BadInput, CorruptObject
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.turns import read_turns

SIZE = 5 * 10**9
ROOM = 2 * 10**9
"""Of address space: as much as nothing here needs, and less than a bomb makes."""


def bomb(path: Path, *, states_size: bool) -> None:
    """A few hundred kB that become 5 GB: one text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coder = zstandard.ZstdCompressor(level=19).compressobj(size=SIZE if states_size else -1)
    piece = b'"' + b" " * (10**8 - 1)
    with path.open("wb") as file:
        for _ in range(SIZE // len(piece)):
            file.write(coder.compress(piece))
        file.write(coder.flush())
    assert path.stat().st_size < 10**6


@pytest.fixture
def room():
    """Less memory than it takes, for this process, so that what is unpacked whole fails and takes nothing with it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("states_size", [True, False])
def test_a_shared_store_s_session_is_not_unpacked_beyond_its_limit(
    tmp_path: Path, states_size: bool, room: None
) -> None:
    store = TraceStore(tmp_path / "store", is_new=True)
    bomb(tmp_path / "store/sessions" / f"{'0' * 64}.json.zst", states_size=states_size)
    with pytest.raises(CorruptObject, match="of 134217728 at most"):
        store.session("0" * 64)
    with pytest.raises(CorruptObject, match="isn't a session"):
        list(store.states())


def test_an_endless_session_and_an_endless_index_are_not_read_whole(tmp_path: Path, room: None) -> None:
    store = TraceStore(tmp_path / "store", is_new=True)
    session = tmp_path / "store/sessions" / f"{'0' * 64}.json.zst"
    session.parent.mkdir()
    for place in (session, tmp_path / "store/index.json"):
        place.touch()
        os.truncate(place, 8 * 2**30)
    with pytest.raises(CorruptObject, match="isn't a session"):
        store.session("0" * 64)
    with pytest.raises(BadInput, match="more than 536870912 bytes"):
        TraceStore(tmp_path / "store")


@pytest.mark.parametrize("name", ["traces.jsonl", "traces.jsonl.zst"])
def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, name: str, room: None) -> None:
    if name.endswith(".zst"):
        bomb(tmp_path / name, states_size=False)
    else:
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 8 * 2**30)
    with pytest.raises(BadInput, match="line 1, has more than 134217728 bytes: it is not read"):
        list(read_turns(tmp_path / name))
