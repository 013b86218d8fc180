"""Nothing that a site writes into the bucket reaches people raw, endless, or as a word against others."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_prime.store import keys
from composer_prime.sync.canonical import PROTOCOL, canonical, sha256_hex
from composer_prime.sync.owner import Owner
from composer_prime.visible import visible
from composer_prime.watch.status import MAX_PROBLEMS, look
from tests.cli.command_line import call
from tests.spec.runs import KEYS, OWNER, Play

HOSTILE = "\x1b[2J\x1b]0;owned\x07\nok: all is well\r\x9b1A\u202e\u2028[red]"
SIGNERS = {"commit": "committer", "claim": "site", "beat": "site", "offer": "site"}
KINDS = {"commit": "Commit", "claim": "Claim", "beat": "Beat", "offer": "Offer"}
RECORDS = {
    "commit": keys.commit(0, 1),
    "offer": keys.offer(0, 1, "c"),
    "claim": keys.claim("c", 0),
    "beat": keys.beat("c", 0),
    "manifest": keys.manifest(),
    "admission": keys.admission(1),
}
EVENTS = (
    {"event": "offer", "fragment": 0, "version": 0, "nbytes": 1760, "tokens": 1},
    {"event": "round", "fragment": 0, "version": 0, "fault": "x", "agreement": {"a": 0.5}},
    {"event": "equivocated", "fragment": 0, "version": 0, "by": "a"},
)


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


def texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a record holds text, the names of its tables among them."""
    if isinstance(value, str):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        yield from texts(each, (*path, name))


def planted(record: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """The record with what is hostile behind one of its texts."""
    changed = json.loads(json.dumps(record))
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] += HOSTILE
    return changed


def signed(kind: str, record: dict[str, Any], signer: str, run_sha: str) -> dict[str, Any]:
    fields = {name: value for name, value in record.items() if name != "signature"}
    message = f"composer-prime/{PROTOCOL}/{KINDS[kind]}/{run_sha}\n".encode() + canonical(fields)
    return fields | {"signature": KEYS[signer].sign(message)}


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


def check(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert not [character for character in text if character != "\n" and visible(character) != character], text
    assert "ok: all is well" not in [line.strip() for line in lines]


@pytest.mark.parametrize("kind", RECORDS)
def test_no_text_of_a_record_reaches_people_raw(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place, run_sha = copy / RECORDS[kind], sha256_hex((copy / keys.manifest()).read_bytes())
    sound = place.read_bytes()
    record = json.loads(sound)
    if kind == "commit":  # such as an offer whose codec is hostile, in the words of who refuses it
        record["refused"] = [{"site": "d", "why": "coded as topk"}]
    paths = list(texts(record))
    assert paths
    for path in paths:
        forged = planted(record, path)
        variants = [forged]
        if kind in SIGNERS and path != ("signature",):
            variants.append(signed(kind, forged, record[SIGNERS[kind]], run_sha))
        for variant in variants:
            place.write_bytes(canonical(variant))
            check(shown(capsys, monkeypatch, copy))
    place.write_bytes(sound)


def write_tape(folder: Path, site: str, lines: list[str]) -> None:
    place = folder / f"{keys.tape_prefix(site)}000000/00000000.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(f"{line}\n" for line in lines))


def test_no_text_of_a_tape_reaches_people_raw(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for event in EVENTS:
        for path in texts(event):
            write_tape(copy, "c", [json.dumps(planted(event, path)), HOSTILE])
            check(shown(capsys, monkeypatch, copy))


def test_13_000_bad_lines_of_a_guest_are_a_few_lines(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(shown(capsys, monkeypatch, copy))
    write_tape(copy, "c", [f"no event {number}" for number in range(13_000)])
    lines = shown(capsys, monkeypatch, copy)
    assert len(lines) <= before + 10
    assert any("12,997 more such lines" in line for line in lines)


def test_bad_offers_of_thousands_of_rounds_are_a_few_lines_and_hide_no_others(copy: Path, tmp_path: Path) -> None:
    from composer_prime.store import open_store

    for version in range(2, 2000):
        place = copy / keys.offer(0, version, "c")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(f"no record {version}".encode())
    (copy / keys.beat("b", 0)).write_bytes(b"nothing")
    found = look(open_store(f"file://{copy}"))
    assert len(found.problems) <= 8 <= MAX_PROBLEMS
    assert any("site c: 1,995 more problems" in problem for problem in found.problems)
    assert any(problem.startswith("site b has not beaten") for problem in found.problems)


def test_nine_petabytes_that_a_guest_claims_are_told_and_not_counted(copy: Path) -> None:
    from composer_prime.store import open_store

    store = open_store(f"file://{copy}")
    sound = look(store).bytes.payloads
    write_tape(copy, "c", [json.dumps(EVENTS[0] | {"nbytes": 2**53, "version": 1})])
    found = look(store)
    assert found.bytes.payloads <= sound
    assert any(f"site c says {2**53} bytes" in problem and "not counted" in problem for problem in found.problems)


@pytest.mark.parametrize("guests", ["c", "cd"])
def test_what_guests_tell_of_others_counts_for_nothing(run: Path, copy: Path, guests: str) -> None:
    from composer_prime.store import open_store

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
