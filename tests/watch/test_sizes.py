"""Whatever one's object of 8 GiB lies at: no command reads more of it than it has room for, and says where it stops."""

import os
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from composer_prime.gateway import invitation_keys
from composer_prime.store import keys, open_store
from composer_prime.store.file import FileStore
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.members import claim_incarnation
from composer_prime.sync.owner import Owner
from composer_prime.sync.roster import Roster
from composer_prime.watch.status import look
from tests.architecture import REPOSITORY, source_files
from tests.spec.runs import KEYS, OWNER, Play

HUGE, ROOM = 8 * 2**30, 64 * 2**20
COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("verify",),
    ("contribution", "--site", "c"),
    ("invite", "--list"),
)
KINDS = ("manifest", "admission", "claim", "beat", "tape", "offer", "payload", "commit", "master", "invitation")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the members a and b and the guest c, after two rounds."""
    folder = tmp_path_factory.mktemp("run") / "run"
    play = Play(folder, "ab", signed=True, sizes=(10, 40, 7), quorum=2)
    Owner(play.store, OWNER).admit("c", KEYS["c"].public, guest=True)
    play.join("c")
    play.rounds(2)
    play.store.put(f"{keys.tape_prefix('c')}000000/00000000.jsonl", b'{"event": "x"}')
    play.store.put(invitation_keys.invitation("c", 1), b"{}")
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a read of more than there is room for fails at once, instead of taking the machine with it."""
    get, get_range = FileStore.get, FileStore.get_range

    def sized(store: FileStore, key: str, length: int) -> None:
        place = Path(store.uri.removeprefix("file://")) / key
        size = min(length, place.stat().st_size) if place.is_file() else 0
        assert size <= ROOM, f"{size} bytes of {key} are read at once"

    def checked_get(store: FileStore, key: str) -> bytes:
        sized(store, key, HUGE)
        return get(store, key)

    def checked_range(store: FileStore, key: str, start: int, length: int) -> bytes:
        sized(store, key, length)
        return get_range(store, key, start, length)

    monkeypatch.setattr(FileStore, "get", checked_get)
    monkeypatch.setattr(FileStore, "get_range", checked_range)
    return Path(shutil.copytree(run, tmp_path / "run"))


def of_kind(folder: Path, kind: str) -> list[str]:
    listed = open_store(f"file://{folder}").list("")
    if kind == "admission":
        return [key for key in listed if key.startswith(keys.admissions_prefix())]
    if kind == "tape":
        return [key for key in listed if key.startswith(keys.tape_prefix("c"))]
    if kind == "invitation":
        return [key for key in listed if invitation_keys.is_invitation(key)]
    return [key for key in listed if (place := keys.place(key)) is not None and place.kind == kind]


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_reads_an_endless_object_whole(cli, copy: Path, kind: str) -> None:
    found = of_kind(copy, kind)
    assert found, f"no {kind} in the run"
    for key in found:
        os.truncate(copy / key, HUGE)
    for command in COMMANDS:
        answer = cli(command[0], copy, *command[1:])
        assert "Traceback" not in answer.err and answer.err.count("\n") <= 1


def test_status_says_what_it_does_not_read_of_a_tape(copy: Path) -> None:
    store, before = open_store(f"file://{copy}"), look(open_store(f"file://{copy}"))
    (copy / (key := f"{keys.tape_prefix('c')}000000/00000000.jsonl")).touch()
    os.truncate(copy / key, HUGE)
    found = look(store)
    assert found.sites == before.sites
    (problem,) = set(found.problems) - set(before.problems)
    assert problem.startswith(key) and "at most 4194304" in problem


def test_many_pieces_of_a_tape_are_read_up_to_a_limit(copy: Path) -> None:
    store = open_store(f"file://{copy}")
    piece = b'{"event": "x"'.ljust(2**22 - 2) + b"}\n"
    first = copy / f"{keys.tape_prefix('c')}000000/10000000.jsonl"
    first.write_bytes(piece)
    for number in range(1, 80):
        os.link(first, first.with_name(f"{10_000_000 + number}.jsonl"))
    problems = [each for each in look(store).problems if "tape" in each]
    assert len(problems) == 1, problems
    (problem,) = problems
    assert "268435456 bytes in all" in problem


def test_an_endless_claim_of_ones_own_name_stops_no_start(copy: Path) -> None:
    with closing(open_store(f"file://{copy}")) as store:
        roster = Roster(store, *find_manifest(store), KEYS["c"])
        roster.refresh()
        place = copy / keys.claim("c", 1)
        place.parent.mkdir(exist_ok=True)
        place.touch()
        os.truncate(place, HUGE)
        assert claim_incarnation(store, "c", roster) == 2


def test_no_module_reads_an_object_whole_that_somebody_else_may_have_written() -> None:
    whole = re.compile(r"\b_?(?:store|opened|bucket)\.get\b")
    found = [
        f"{path.relative_to(REPOSITORY)}: {line.strip()}"
        for path in source_files("composer_prime")
        if "store" not in path.relative_to(REPOSITORY).parts
        for line in path.read_text(encoding="utf-8").splitlines()
        if whole.search(line)
    ]
    assert found == []
