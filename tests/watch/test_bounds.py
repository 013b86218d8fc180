"""What a site writes reaches people neither endless, nor beyond what can be, nor as a word against others."""

import json
import shutil
from pathlib import Path
from typing import Any, TypeVar

import pytest

from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Beat, Commit, Refused, Signed
from composer_prime.sync.roster import Roster
from composer_prime.volunteers.contribution import contribution
from composer_prime.watch.status import MAX_PROBLEMS, look
from composer_prime.watch.tables import MAX_SITES
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


S = TypeVar("S", bound=Signed)


def signed(store: Store, record: S, by: str) -> S:
    run_sha = sha256_hex(store.get(keys.manifest()))
    return record.model_copy(update={"signature": KEYS[by].sign(record.message(run_sha))})


def write_tape(folder: Path, site: str, lines: list[str]) -> None:
    place = folder / f"{keys.tape_prefix(site)}000000/00000000.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(f"{line}\n" for line in lines))


def test_13_000_bad_lines_of_a_guest_are_a_few_lines(copy, capsys, monkeypatch):
    before = len(shown(capsys, monkeypatch, copy))
    write_tape(copy, "c", [f"no event {number}" for number in range(13_000)])
    lines = shown(capsys, monkeypatch, copy)
    assert len(lines) <= before + 10
    assert any("12,997 more such lines" in line for line in lines)


def test_bad_offers_of_thousands_of_rounds_are_a_few_lines_and_hide_no_others(copy, tmp_path):
    for version in range(2, 2000):
        place = copy / keys.offer(0, version, "c")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(f"no record {version}".encode())
    (copy / keys.beat("b", 0)).write_bytes(b"nothing")
    found = look(open_store(f"file://{copy}"))
    assert len(found.problems) <= 8 <= MAX_PROBLEMS
    assert any("site c: 1,995 more problems" in problem for problem in found.problems)
    assert any(problem.startswith("site b has not beaten") for problem in found.problems)


def test_names_that_nobody_admitted_are_no_sites(copy):
    before = look(store := open_store(f"file://{copy}"))
    for number in range(300):
        store.create(keys.claim(f"x{number}", 0), b"{}")
    found = look(store)
    assert found.sites == before.sites
    assert found.problems == (*before.problems, "names that were never admitted have claims: 300, such as x0")


def test_where_anybody_may_come_the_table_ends_and_says_so(tmp_path, capsys, monkeypatch):
    play = Play(tmp_path / "run", "ab", signed=False, sizes=(10, 40, 7), quorum=2)
    play.rounds(2, fragments=1)
    for number in range(300):
        play.store.create(keys.claim(f"0{number}", 0), b"{}")
    lines = call(capsys, monkeypatch, "status", str(tmp_path / "run")).out.split("\n")
    assert len(lines) < 120 and any(f"{MAX_SITES} of 302" in line for line in lines)
    assert sum(" a " in line or " b " in line for line in lines) >= 2, "those that take part come first"


def test_beats_of_more_than_can_be_are_told_and_not_counted(tmp_path):
    play = Play(tmp_path / "run", "abcd", signed=True, sizes=(10, 40, 7), quorum=2, step_tokens=100)
    play.rounds(2, fragments=1)
    store = play.store
    false: dict[str, dict[str, Any]] = {"b": {"trained_tokens": 2**53}, "c": {"versions": (7,) * 10_000}}
    for site, claims in false.items():
        key = keys.beat(site, 0)
        beat = Beat.from_bytes(store.get(key), key).model_copy(update=claims)
        store.put(key, signed(store, beat, site).to_bytes())
    found = look(store)
    tokens = {site.site: site.trained_tokens for site in found.sites}
    assert max(tokens.values()) < 10**6 and max(len(site.versions) for site in found.sites) == 2
    assert [problem.split(" says ")[0] for problem in found.problems] == ["the beat of site b", "the beat of site c"]


def test_a_beat_that_is_not_believed_is_no_sign_of_life(tmp_path):
    play = Play(tmp_path / "run", "ab", signed=True, sizes=(10, 40, 7), quorum=2, liveness_s=10.0, step_tokens=100)
    key = keys.beat("b", 0)
    beat = Beat.from_bytes(play.store.get(key), key).model_copy(update={"trained_tokens": 2**53})
    play.store.put(key, signed(play.store, beat, "b").to_bytes())
    found = {site.site: site for site in look(play.store, 5.0, lambda wait_s: None).sites}
    assert found["b"].trained_tokens == 0 and found["b"].beating is False


def test_who_is_admitted_between_two_looks_is_a_site(copy):
    store = open_store(f"file://{copy}")

    def come(wait_s: float) -> None:
        Owner(store, OWNER).admit("d", KEYS["d"].public, guest=True)
        shutil.copytree(copy / "sites/c", copy / "sites/d")

    assert [site.site for site in look(store, 1.0, come).sites] == [*"abcd"]


def test_what_a_revoked_member_commits_under_an_older_admission_counts_for_nothing(copy):
    store = open_store(f"file://{copy}")
    Owner(store, OWNER).revoke("b")
    roster = Roster(store, *find_manifest(store))
    roster.refresh()
    number, sha = roster.honoured
    first, second = keys.commit(0, 0), keys.commit(0, 1)
    honours = {"admissions": number, "admission_sha": sha, "committer": "a"}
    says = {"refused": (Refused(site="a", why="a liar"),), "committer": "b"}
    for key, changes, by in ((first, honours, "a"), (second, says, "b")):
        commit = Commit.from_bytes(store.get(key), key).model_copy(update=changes)
        store.put(key, signed(store, commit, by).to_bytes())
    found = look(store)
    assert found.refused == {} and found.by_fragment[0].faulty == 1
    assert any(f"{second} honours admission" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("changes", "signer", "why"),
    [
        ({}, None, "is not signed"),
        ({}, "b", "signature"),
        ({"committer": "c"}, "c", "guest"),
        ({"version": 0}, "a", "is another round's"),
        ({"admissions": 7}, "a", "which isn't there"),
    ],
    ids=["unsigned", "another's", "a guest's", "misplaced", "without its admission"],
)
def test_what_no_committer_said_of_others_counts_for_nothing(copy, changes, signer, why):
    store = open_store(f"file://{copy}")
    before = look(store)
    key = keys.commit(0, 1)
    said = {"refused": (Refused(site="b", why="a liar"),), "signature": None}
    commit = Commit.from_bytes(store.get(key), key).model_copy(update=said | {"committer": "a"} | changes)
    store.put(key, (commit if signer is None else signed(store, commit, signer)).to_bytes())
    found = look(store)
    assert found.refused == before.refused
    assert [site.rounds_taken for site in found.sites if site.site in "ab"] == [1, 1]
    assert (found.by_fragment[0].version, found.by_fragment[0].faulty) == (2, before.by_fragment[0].faulty + 1)
    (problem,) = set(found.problems) - set(before.problems)
    assert problem.startswith(f"{key} ") and why in problem


def test_a_commit_far_behind_the_runs_end_closes_no_round(copy):
    far = copy / keys.commit(0, 99_999_990)
    far.parent.mkdir(parents=True)
    far.write_bytes((copy / keys.commit(0, 1)).read_bytes())
    assert [fragment.version for fragment in look(open_store(f"file://{copy}")).by_fragment] == [2, 0]


def test_a_commit_of_endless_parts_is_read_as_any_other(copy):
    place = copy / keys.commit(0, 1)
    commit = Commit.from_bytes(place.read_bytes(), "commit").model_copy(update={"num_parts": 2**53})
    place.write_bytes(commit.to_bytes())
    assert look(open_store(f"file://{copy}")).by_fragment[0].version == 2


def test_nine_petabytes_that_a_guest_claims_are_told_and_not_counted(copy):
    store = open_store(f"file://{copy}")
    sound = look(store).bytes.payloads
    write_tape(copy, "c", [json.dumps({"event": "offer", "fragment": 0, "version": 1, "nbytes": 2**53, "tokens": 1})])
    found = look(store)
    assert found.bytes.payloads <= sound
    assert any(f"site c says {2**53} bytes" in problem and "not counted" in problem for problem in found.problems)


def test_traffic_of_processes_that_never_started_is_none_of_a_site_s(copy):
    event = {"event": "round", "fragment": 0, "version": 0, "fault": None, "bytes_up": 7, "bytes_down": 5}
    write_tape(copy, "c", [json.dumps(event | {"incarnation": number}) for number in (0, 1, 10**6)])
    found = contribution(open_store(f"file://{copy}"), "c")
    assert (found.bytes_up, found.bytes_down, found.starts) == (7, 5, 1)
