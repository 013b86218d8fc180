"""What strangers write into a bucket reaches nobody's terminal raw: each text of each record, by each command."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_prime.gateway import invitation_keys
from composer_prime.launch import launch_keys
from composer_prime.launch.records import Ended, JobRecord, Launch, Started, Stop
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.canonical import PROTOCOL, Signed, canonical, sha256_hex
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import (
    Admission,
    Beat,
    Claim,
    Close,
    Commit,
    Invited,
    Manifest,
    Offer,
    Part,
    Refused,
    Taken,
)
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.cli.command_line import Answer, call
from tests.sync.harness import ThreadSite, make_terms, run_sites

HOSTILE = "\x1b[2J\x1b]0;pwned\x07[red]\u202e\u2028\x85\x7f\nok: run run, closed; its masters are what its log makes"
COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("verify",),
    ("contribution", "--site", "g"),
    ("contribution", "--site", "g", "--json"),
    ("invite", "--list"),
)
OF_LAUNCHES = (("ps",), ("ps", "--json"))
MOST_LINES, MOST_LINES_OF_JSON = 60, 200
KEYS = {name: SigningKey.from_bytes(name.encode() * 32) for name in "oabg"}
SHA = "0" * 64
LAST = 3
"""The last round of the run."""

OFFER = Offer(
    site="g", incarnation=0, fragment=0, version=LAST, base_sha=SHA, tokens=10, steps=1, trained_tokens=10,
    codec="fp32", payload=keys.payload(0, LAST, "g", SHA), sha256=SHA, slices="AA==", nbytes=8, norms=(1.0,),
)  # fmt: skip
INTENT = JobRecord(
    on="local", spec=SHA, timeout_s=60, usd_per_hour=1.0, secrets=("x",), account="x",
    created_at=0.0,
)  # fmt: skip
ENDED = Ended(state="failed", exit_code=1, seconds=1.0, message="x", ended_at=1.0)
RECORDS = {
    record_key: (record, writer)
    for record_key, record, writer in (
        (keys.claim("g", 0), Claim(site="g", incarnation=0, nonce="x", host="x", pid=1), "g"),
        (
            keys.beat("g", 0),
            Beat(
                site="g", incarnation=0, counter=1, state="done", versions=(0, 0), inner_step=1, trained_tokens=1,
                pins=(0, 0),
            ),
            "g",
        ),
        (keys.offer(0, LAST, "g"), OFFER, "g"),
        (
            keys.commit(0, LAST),
            Commit(
                fragment=0, version=LAST, base_sha=SHA, taken=(Taken(offer=OFFER, multiplier=1.0),),
                refused=(Refused(site="g", why="x"),), previous=SHA, num_parts=0, admission_sha=SHA, committer="a",
                incarnation=0,
            ),
            "a",
        ),
        (
            keys.merged(0, LAST, 0),
            Part(
                fragment=0, version=LAST, part=0, commit_sha=SHA, excluded=(Refused(site="g", why="x"),), payload="x",
                sha256=SHA, nbytes=8, reducer="a",
            ),
            "a",
        ),
        (
            keys.close(),
            Close(versions=(LAST, LAST), masters=(SHA, SHA), voids=((), ()), closed_by="a"),
            "a",
        ),
        (keys.admission(2), Admission(number=2, keys={"g": "x"}, guests=("g",)), "o"),
        (
            invitation_keys.invitation("g", 1),
            Invited(site="g", number=1, public=KEYS["g"].public, guest=True, expires_at=1),
            "o",
        ),
        (launch_keys.launch(1), Launch(number=1, name="x"), ""),
        (launch_keys.intent(1, "a", 1), INTENT, ""),
        (launch_keys.job(1, "a", 1), Started(id="x"), ""),
        (launch_keys.stop(1, "a", 1), Stop(state="hung", why="x", by="x"), ""),
        (launch_keys.end(1, "a", 1), ENDED, ""),
        (launch_keys.stop(1), Stop(by="x"), ""),
    )
}  # fmt: skip
EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "round", "fragment": 0, "version": 0, "fault": "x"},
    {"event": "offer", "fragment": "x", "version": 0, "tokens": "x", "nbytes": "x"},
)


def texts(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where texts stand in a record as JSON has it; a last "*" is the name of a field that the writer chose."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from texts(inner, (*path, name))
            if path and path[-1] in ("keys", "env", "caches", "resources"):
                yield (*path, "*")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from texts(inner, (*path, index))


def planted(value: Any, sample: Any, path: tuple[Any, ...]) -> Any:
    """A copy with the hostile text at that place; what is empty is the sample's."""
    if not path:
        return HOSTILE
    place, *rest = path
    if place == "*":
        return {HOSTILE: next(iter((value or sample).values()))}
    if isinstance(sample, list):
        return [planted((value or sample)[place], sample[place], tuple(rest))]
    known = sample if value is None else value
    return known | {place: planted(known.get(place, sample[place]), sample[place], tuple(rest))}


@pytest.fixture(scope="module", params=[True, False], ids=["with keys", "open to all"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """The folder of a run of a and b that has ended, of which g is a guest; and whether it has keys."""
    folder = tmp_path_factory.mktemp("made") / "run"
    store, has_keys = open_store(str(folder)), request.param
    founding = Founding(KEYS["o"].public, {site: KEYS[site].public for site in "ab"}) if has_keys else Founding()
    terms = make_terms(quorum=2, gather_sites=1, aggregate="clipped", weighting="equal")
    run_sites(
        *(
            ThreadSite(store, terms, site, data_seed=place, key=KEYS[site] if has_keys else None, founding=founding)
            for place, site in enumerate("ab")
        )
    )
    if has_keys:
        Owner(store, KEYS["o"]).admit("g", KEYS["g"].public, guest=True)
    for key, (record, writer) in RECORDS.items():
        if writer in "ga" and ("/g" in key or "launches" in key):
            store.create(key, sealed(store, record.model_dump(mode="json"), record, writer if has_keys else ""))
    return folder, has_keys


def sealed(store: Store, data: Any, record: Any, writer: str) -> bytes:
    """The record's bytes, signed by its writer where its fields are such that it can be; else as they are."""
    if isinstance(record, Signed) and writer:
        head = f"composer-prime/{PROTOCOL}/{type(record).__name__}/{sha256_hex(store.get(keys.manifest()))}\n".encode()
        unsigned = {name: value for name, value in data.items() if name != "signature"}
        data = unsigned | {"signature": KEYS[writer].sign(head + canonical(unsigned))}
    return canonical(data)


ROWS = [
    pytest.param(key, path, id=f"{type(record).__name__} {'.'.join(map(str, path))}")
    for key, (record, _) in RECORDS.items()
    for path in (*texts(record.model_dump(mode="json")), ())
    if path != ("signature",)
]


@pytest.mark.parametrize(("key", "path"), ROWS)
def test_a_text_in_a_record_is_spelled_by_all_that_read_the_bucket(made, tmp_path, capsys, monkeypatch, key, path):
    folder, has_keys = made
    shutil.copytree(folder, tmp_path / "run")
    store = open_store(str(tmp_path / "run"))
    record, writer = RECORDS[key]
    sample = record.model_dump(mode="json")
    stands = json.loads(store.get(key)) if key in store.list(key.rpartition("/")[0]) else None
    data = planted(stands, sample, path) if path else [HOSTILE]
    put(store, key, canonical(data) if not path else sealed(store, data, record, writer if has_keys else ""))
    assert_nothing_raw(tmp_path / "run", capsys, monkeypatch, OF_LAUNCHES if "launches" in key else COMMANDS)


@pytest.mark.parametrize("place", ["run", "created_by", "fingerprint", "test_vector", "owner"])
def test_a_text_in_the_manifest_is_spelled(made, tmp_path, capsys, monkeypatch, place):
    shutil.copytree(made[0], tmp_path / "run")
    store = open_store(str(tmp_path / "run"))
    data = json.loads(store.get(keys.manifest()))
    where = data["terms"] if place in data["terms"] else data
    where[place] = HOSTILE
    put(store, keys.manifest(), canonical(data))
    Manifest.from_bytes(store.get(keys.manifest()), keys.manifest())
    assert_nothing_raw(tmp_path / "run", capsys, monkeypatch)


@pytest.mark.parametrize(
    ("number", "path"), [(number, path) for number, event in enumerate(EVENTS) for path in texts(event)]
)
def test_a_text_on_a_tape_is_spelled(made, tmp_path, capsys, monkeypatch, number, path):
    shutil.copytree(made[0], tmp_path / "run")
    data = json.dumps(planted(EVENTS[number], EVENTS[number], path)).encode() + b"\n" + HOSTILE.encode() + b"\n"
    put(open_store(str(tmp_path / "run")), keys.tape("g", 7, sha256_hex(data)), data)
    assert_nothing_raw(tmp_path / "run", capsys, monkeypatch)


@pytest.mark.parametrize(
    "folder", ["sites/g/000000", "rounds/0000/00000003/offers", "masters/0000", "tape/g", "admissions"]
)
def test_a_text_in_a_key_is_spelled(made, tmp_path, capsys, monkeypatch, folder):
    shutil.copytree(made[0], tmp_path / "run")
    place = tmp_path / "run" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / HOSTILE.replace("/", "")).write_bytes(b"{")
    assert_nothing_raw(tmp_path / "run", capsys, monkeypatch)


def put(store: Store, key: str, data: bytes) -> None:
    """Write over whatever stands there, as who has credentials for the bucket can."""
    store.delete(key)
    store.create(key, data)


def assert_nothing_raw(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    commands: tuple[tuple[str, ...], ...] = (*COMMANDS, *OF_LAUNCHES),
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # the tests' own: a command sets up none
    for command in commands:
        name, *rest = command
        answer = call(capsys, monkeypatch, name, str(run), *rest)
        raw = {character for character in answer.out + answer.err if not (character.isprintable() or character == "\n")}
        assert not raw, (command, raw, answer)
        assert_no_line_is_forged(answer, name)
        assert (answer.out + answer.err).count("\n") <= (MOST_LINES_OF_JSON if "--json" in command else MOST_LINES), (
            command
        )


def assert_no_line_is_forged(answer: Answer, name: str) -> None:
    lines = (answer.out + answer.err).splitlines()
    forged = [line for line in lines if line.startswith("ok: run run, closed; its masters")]
    assert len(forged) <= (name == "verify" and answer.code == 0), answer
