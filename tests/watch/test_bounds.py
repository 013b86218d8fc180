"""What a site writes reaches people neither endless, nor beyond what can be, nor as a word against others."""

import json
import shutil
from pathlib import Path

import pytest

from composer_prime.store import keys, open_store
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Commit
from composer_prime.watch.status import MAX_PROBLEMS, look
from tests.cli.command_line import call
from tests.spec.runs import KEYS, OWNER, Play


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with keys, of the members a and b and the guest c, after two rounds of fragment 0."""
    folder = tmp_path_factory.mktemp("run") / "run"
    play = Play(folder, "ab", signed=True, sizes=(10, 40, 7), quorum=2)
    Owner(play.store, OWNER).admit("c", KEYS["c"].public, guest=True)
    play.join("c")
    play.rounds(2, fragments=1)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """All lines that commands print of a run."""
    lines = []
    for command in (
        ("status",),
        ("status", "--json"),
        ("verify",),
        ("contribution", "--site", "c"),
        ("invite", "--list"),
    ):
        answer = call(capsys, monkeypatch, command[0], str(folder), *command[1:])
        lines += (answer.out + answer.err).split("\n")
    return lines


def write_tape(folder: Path, site: str, lines: list[str]) -> None:
    place = folder / f"{keys.tape_prefix(site)}000000/00000000.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(f"{line}\n" for line in lines))


def test_13_000_bad_lines_of_a_guest_are_a_few_lines(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(shown(capsys, monkeypatch, copy))
    write_tape(copy, "c", [f"no event {number}" for number in range(13_000)])
    lines = shown(capsys, monkeypatch, copy)
    assert len(lines) <= before + 10
    assert any("12,997 more such lines" in line for line in lines)


def test_bad_offers_of_thousands_of_rounds_are_a_few_lines_and_hide_no_others(copy: Path, tmp_path: Path) -> None:
    for version in range(2, 2000):
        place = copy / keys.offer(0, version, "c")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(f"no record {version}".encode())
    (copy / keys.beat("b", 0)).write_bytes(b"nothing")
    found = look(open_store(f"file://{copy}"))
    assert len(found.problems) <= 8 <= MAX_PROBLEMS
    assert any("site c: 1,995 more problems" in problem for problem in found.problems)
    assert any(problem.startswith("site b has not beaten") for problem in found.problems)


def test_a_commit_far_behind_the_runs_end_closes_no_round(copy: Path) -> None:
    far = copy / keys.commit(0, 99_999_990)
    far.parent.mkdir(parents=True)
    far.write_bytes((copy / keys.commit(0, 1)).read_bytes())
    assert [fragment.version for fragment in look(open_store(f"file://{copy}")).by_fragment] == [2, 0]


def test_a_commit_of_endless_parts_is_read_as_any_other(copy: Path) -> None:
    place = copy / keys.commit(0, 1)
    commit = Commit.from_bytes(place.read_bytes(), "commit").model_copy(update={"num_parts": 2**53})
    place.write_bytes(commit.to_bytes())
    assert look(open_store(f"file://{copy}")).by_fragment[0].version == 2


def test_nine_petabytes_that_a_guest_claims_are_told_and_not_counted(copy: Path) -> None:
    store = open_store(f"file://{copy}")
    sound = look(store).bytes.payloads
    write_tape(copy, "c", [json.dumps({"event": "offer", "fragment": 0, "version": 1, "nbytes": 2**53, "tokens": 1})])
    found = look(store)
    assert found.bytes.payloads <= sound
    assert any(f"site c says {2**53} bytes" in problem and "not counted" in problem for problem in found.problems)


@pytest.mark.parametrize("guests", ["c", "cd"])
def test_what_guests_tell_of_others_counts_for_nothing(run: Path, copy: Path, guests: str) -> None:
    store = open_store(f"file://{copy}")
    if "d" in guests:
        Owner(store, OWNER).admit("d", KEYS["d"].public, guest=True)
        shutil.copytree(copy / "sites/c", copy / "sites/d")
    false = [{"event": "equivocated", "fragment": 0, "version": version, "by": "a"} for version in (0, 1)]
    false += [
        {"event": "round", "fragment": 0, "version": version, "fault": None, "agreement": {"a": -1.0}}
        for version in (0, 1)
    ]
    for guest in guests:
        write_tape(copy, guest, [json.dumps(event) for event in false])
    told = {site.site: (site.rounds_against, site.rounds_equivocated) for site in look(store).sites}
    assert told["a"] == (0, 0)
    write_tape(copy, "b", [json.dumps(event) for event in false])  # a member's word of how offers stood does count
    assert next(site for site in look(store).sites if site.site == "a").rounds_against == 2
