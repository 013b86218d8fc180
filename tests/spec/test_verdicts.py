"""Commits and parts that don't follow, in one table: what was changed, the reason, and that both the reader written
from the document and the code (as `verify` drives it) refuse it."""

import base64
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_prime.store import keys
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Refused
from tests.spec.forging import Forger
from tests.spec.reader import Reading, read_run
from tests.spec.runs import KEYS, OWNER, Play, Verdict, verify

LAST = 3
H = 4
"""The round whose commit is changed: nothing in the bucket speaks of it afterwards."""

ALL_OUT = tuple(Refused(site=site, why="") for site in "abcde")
NOTHING = {"payload": None, "sha256": None, "slices": "", "norms": (), "tokens": 0, "steps": 0, "nbytes": 0}


def both(folder: Path) -> tuple[Reading, Verdict]:
    """The reading and the verifier's verdict, which agree on masters and void rounds."""
    reading, verdict = read_run(folder), verify(folder)
    assert reading.masters == verdict.masters
    assert reading.voids.keys() == verdict.voids.keys(), (reading.voids, verdict.voids)
    return reading, verdict


# --- commits ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with keys: a and b from the start, the guest c since the first admission, d since the second."""
    folder = tmp_path_factory.mktemp("signed")
    terms = {"quorum": 2, "aggregate": "clipped", "max_stale_rounds": 2, "step_tokens": 100}
    play = Play(folder, "ab", signed=True, sizes=(10, 40, 7), **terms)
    play.rounds(1, fragments=1)
    Owner(play.store, OWNER).admit("c", KEYS["c"].public, guest=True)
    play.join("c")
    play.rounds(1, fragments=1)
    Owner(play.store, OWNER).admit("d", KEYS["d"].public)
    play.join("d")
    play.rounds(LAST - 1, fragments=1)
    return folder


@pytest.fixture
def forger(signed: Path, tmp_path: Path) -> Forger:
    """One for a copy of that run."""
    shutil.copytree(signed, tmp_path / "run")
    return Forger(tmp_path / "run", LAST)


Forgery = Callable[[Forger], bytes]

MOST_STEPS = 3 * H
"""Of a, whose last offer was captured a round ago."""
MOST, EVER = 4 * 100 * MOST_STEPS, 4 * 100 * (LAST + 2) * H


def of_a(**changes: object) -> Forgery:
    """The commit in which a's offer is another one."""
    return lambda forger: forger.taking(forger.changed_offers("a", **changes))


def moved_by_a(site: str, back: int = 0, at: int = 0) -> Forgery:
    """The commit in which a's offer has the bytes of another one, or another key."""
    return lambda forger: forger.taking(forger.changed_offers("a", **forger.payload_of(site, back, at)))


def admission_of(folder: Path, number: int) -> dict[str, Any]:
    """What a commit says that names an admission."""
    return {"admissions": number, "admission_sha": sha256_hex((folder / keys.admission(number)).read_bytes())}


def zeros_of_two(forger: Forger) -> bytes:
    offers = forger.offers()
    for site in "ab":
        changed = forger.changed_offers(site, **forger.zeros_of(site))
        offers |= {offer.site: offer for offer in changed if offer.site == site}
    return forger.taking(offers.values())


def norms_of_a(change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Forgery:
    return lambda forger: of_a(norms=change(forger.offers()["a"].norms))(forger)


def respelled(text: str) -> str:
    """The same bytes to whoever takes no notice of the bits that base64 leaves over, or of padding without need."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    whole = text.rstrip("=")
    if whole == text:
        return text + "===="
    return whole[:-1] + digits[digits.index(whole[-1]) + 1] + text[len(whole) :]


def slices_of_a(change: Callable[[bytes], bytes]) -> Forgery:
    def made(forger: Forger) -> bytes:
        raw = base64.b64decode(forger.offers()["a"].slices)
        return of_a(slices=base64.b64encode(change(raw)).decode())(forger)

    return made


SOUND: dict[str, Forgery] = {
    "as it was": lambda forger: forger.changed(),
    "two offers fewer": lambda forger: forger.taking(list(forger.offers().values())[:2]),
    "no offer": lambda forger: forger.taking([]),
    "other words for people": lambda forger: forger.changed(
        refused=(Refused(site="No Name!", why="\u20ac\x7f"),), incarnation=2**53
    ),
    "a payload as old as it may be": moved_by_a("a", at=2),
    "a's own bytes once more, under another key": moved_by_a("a", back=1),
    "the same zeros of two sites": zeros_of_two,
    "all the tokens and steps that there was time for": of_a(tokens=MOST, trained_tokens=EVER, steps=MOST_STEPS),
}

VOID: dict[str, tuple[str, Forgery]] = {
    "no JSON": ("Invalid JSON", lambda forger: b"{"),
    "a space": ("other bytes than its canonical ones", lambda forger: forger.commit.to_bytes().replace(b",", b", ", 1)),
    "an unknown field": ("Extra inputs", lambda forger: forger.raw(lambda fields: fields.update(more=1))),
    "a field left out": (
        "other bytes than its canonical ones",
        lambda forger: forger.raw(lambda fields: fields.pop("voids")),
    ),
    "a field twice": (
        "other bytes than its canonical ones",
        lambda forger: forger.commit.to_bytes().replace(b'"version":3', b'"version":2,"version":3'),
    ),
    "fields in another order": (
        "other bytes than its canonical ones",
        lambda forger: json.dumps(
            dict(reversed(json.loads(forger.commit.to_bytes()).items())), separators=(",", ":")
        ).encode(),
    ),
    "half a character": (
        "Invalid JSON",
        lambda forger: forger.raw(lambda fields: fields.update(refused=[{"site": "x", "why": "\ud800"}])),
    ),
    "a count as a fraction": (
        "other bytes than its canonical ones",
        lambda forger: forger.raw(lambda fields: fields.update(num_parts=0.0)),
    ),
    "a multiplier as a count": (
        "other bytes than its canonical ones",
        lambda forger: forger.raw(lambda fields: fields["taken"][0].update(multiplier=1)),
    ),
    "a number below 0": ("greater than or equal to 0", lambda forger: forger.changed(incarnation=-1)),
    "a number above 2^53": ("less than or equal to", lambda forger: forger.changed(incarnation=2**53 + 1)),
    "a hash in capitals": ("match pattern", lambda forger: forger.raw(lambda fields: fields.update(previous="A" * 64))),
    "another fragment": ("record says", lambda forger: forger.changed(fragment=1)),
    "another round": ("record says", lambda forger: forger.changed(version=LAST + 1)),
    "another commit before": ("as the commit before", lambda forger: forger.changed(previous="0" * 64)),
    "another master": ("stands on master", lambda forger: forger.changed(base_sha="0" * 64)),
    "a void round that wasn't": ("were void, those were", lambda forger: forger.changed(voids=(LAST - 1,))),
    "multipliers one up": (
        "the rule gives",
        lambda forger: forger.weighed(lambda x: float(np.nextafter(np.float32(x), np.float32(2)))),
    ),
    "multipliers that aren't fp32": ("the rule gives", lambda forger: forger.weighed(lambda x: math.nextafter(x, 2))),
    "a part": ("is cut into 1 parts", lambda forger: forger.changed(num_parts=1)),
    "offers out of order": (
        "not sorted by site, or a site stands twice",
        lambda forger: forger.changed(taken=forger.commit.taken[::-1]),
    ),
    "an offer twice": (
        "not sorted by site, or a site stands twice",
        lambda forger: forger.changed(taken=forger.commit.taken[:1] + forger.commit.taken),
    ),
    "fewer offers than the quorum": ("the quorum is 2", lambda forger: forger.taking([forger.offers()["a"]])),
    "members fewer than the quorum": (
        "the quorum is 2",
        lambda forger: forger.taking([forger.offers()[site] for site in "ac"]),
    ),
    "a guest as heavy as a member": (
        "the rule gives",
        lambda forger: forger.taking(forger.offers().values(), guests=()),
    ),
    "more tokens than there was time for": ("the recipe makes at most", of_a(tokens=MOST + 1, trained_tokens=EVER)),
    "more tokens ever trained than there was time for": (
        "tokens ever trained, the recipe makes at most",
        of_a(trained_tokens=EVER + 1),
    ),
    "more steps than there was time for": ("there is time for at most", of_a(steps=MOST_STEPS + 1)),
    "offers of the round before": ("record says a", lambda forger: forger.taking(forger.offers(back=1).values())),
    "no signature": ("is not signed", lambda forger: forger.commit.model_copy(update={"signature": None}).to_bytes()),
    "another's signature": (
        "has a signature that is not b's",
        lambda forger: forger.signed(forger.commit, "e").to_bytes(),
    ),
    "a guest's": ("a guest, which may only offer", lambda forger: forger.changed(committer="c")),
    "a stranger's": ("has no admitted key", lambda forger: forger.changed(committer="e")),
    "an older admission": (
        "an earlier commit 2",
        lambda forger: forger.changed(committer="a", **admission_of(forger.folder, 1)),
    ),
    "an admission to come": ("which isn't there", lambda forger: forger.changed(admissions=3, admission_sha="0" * 64)),
    "an admission of other bytes": (
        "than the one that the owner signed",
        lambda forger: forger.changed(admission_sha="0" * 64),
    ),
    "an admission without bytes": (
        "than the one that the owner signed",
        lambda forger: forger.changed(admission_sha=None),
    ),
    "an offer of nothing": ("has nothing to merge", of_a(**NOTHING)),
    "an offer on another master": ("stands on master", of_a(base_sha="0" * 64)),
    "an offer of another fragment": ("record says a", of_a(fragment=1)),
    "an offer in another codec": ("coded as int8", of_a(codec="int8")),
    "no tokens": ("0 tokens in", of_a(tokens=0)),
    "no steps": ("in 0 steps", of_a(steps=0)),
    "more tokens than were trained": ("of 2 ever trained", of_a(trained_tokens=2)),
    "another size": (" bytes, fp32 of this fragment has", of_a(nbytes=1764)),
    "a norm below 0": ("norms, the fragment has 2", norms_of_a(lambda norms: (-1.0, *norms[1:]))),
    "norms without end": ("no finite sum", norms_of_a(lambda norms: (1e200, *norms[1:]))),
    "a norm fewer": ("norms, the fragment has 2", norms_of_a(lambda norms: norms[1:])),
    "a slice fewer": ("don't make the sha256", slices_of_a(lambda raw: raw[20:])),
    "hashes spelled otherwise": (
        "in its one spelling",
        lambda forger: of_a(slices=respelled(forger.offers()["a"].slices))(forger),
    ),
    "slices of something else": ("don't make the sha256", slices_of_a(lambda raw: raw[::-1])),
    "hashes that are no base64": ("are no base64", of_a(slices="?")),
    "hashes of half a slice more": ("no multiple of 20", slices_of_a(lambda raw: raw + bytes(13))),
    "a payload's key of another hash": (
        "not that of its sha256",
        lambda forger: of_a(payload=keys.payload(0, LAST, "a", "c" * 64))(forger),
    ),
    "a payload's key that is none": ("does not name a payload", of_a(payload="somewhere/else")),
    "another's payload": (
        "belongs to fragment 0 of b",
        lambda forger: of_a(payload=forger.offers()["b"].payload)(forger),
    ),
    "a payload that was taken": ("was taken by an earlier round", moved_by_a("a", back=1, at=1)),
    "a payload too old": ("rounds may lie between", moved_by_a("a", at=3)),
    "a payload of a round to come": (
        "rounds may lie between",
        lambda forger: of_a(payload=keys.payload(0, LAST + 1, "a", str(forger.offers()["a"].sha256)))(forger),
    ),
    "a copy of this round": ("a copy", moved_by_a("b")),
    "a copy of the round before": ("an earlier round took: a copy", moved_by_a("b", back=1)),
    "offers without a signature": (
        "that is not signed",
        lambda forger: forger.taking(
            offer.model_copy(update={"signature": None}) for offer in forger.offers().values()
        ),
    ),
    "an offer signed by another": (
        "that has a signature that is not a's",
        lambda forger: forger.taking(forger.signed(offer, "b") for offer in forger.offers().values()),
    ),
}


@pytest.mark.parametrize(("kind", "is_void"), [*((kind, False) for kind in SOUND), *((kind, True) for kind in VOID)])
def test_the_reader_and_the_code_agree_on_a_commit_with(forger, kind, is_void):
    why, forgery = VOID[kind] if is_void else ("", SOUND[kind])
    (forger.folder / keys.commit(0, LAST)).write_bytes(forgery(forger))
    reading, verdict = both(forger.folder)
    assert (reading.wrong, verdict.wrong) == ([], [])
    assert reading.versions(0) == LAST + 1
    assert reading.voids.keys() == ({(0, LAST)} if is_void else set()), reading.voids
    assert why in verdict.voids.get((0, LAST), "")


@pytest.mark.parametrize(("factor", "is_true"), [(1.00005, True), (1.0002, False), (0.9998, False), (0.0, False)])
def test_the_reader_and_verify_agree_on_how_far_a_norm_may_be_from_the_payload(forger, factor, is_true):
    data = norms_of_a(lambda norms: (factor * norms[0], *norms[1:]))(forger)
    (forger.folder / keys.commit(0, LAST)).write_bytes(data)
    reading, verdict = both(forger.folder)
    assert (reading.wrong, verdict.wrong) == ([], []) and reading.versions(0) == LAST + 1
    assert reading.voids.keys() == (set() if is_true else {(0, LAST)}), reading.voids


def test_a_void_commit_keeps_both_from_the_older_admissions_of_later_ones(signed, tmp_path):
    for admission, voids in ((1, {(0, 1), (0, 2)}), (2, {(0, 1)})):
        folder = tmp_path / str(admission)
        shutil.copytree(signed, folder)
        forger = Forger(folder, 1)
        named = {number: admission_of(folder, number) for number in (1, 2)}
        void = forger.changed(fragment=1, committer="a", **named[2])
        for version in (2, LAST):
            shutil.rmtree(folder / keys.round_prefix(0, version))
        (folder / keys.commit(0, 1)).write_bytes(void)
        (folder / keys.round_prefix(0, 2)).mkdir()
        after = {"version": 2, "previous": sha256_hex(void), "voids": (1,), "taken": (), "committer": "a"}
        (folder / keys.commit(0, 2)).write_bytes(forger.changed(**after, **named[admission]))
        assert both(folder)[0].voids.keys() == voids


def test_both_hash_no_more_of_a_commit_that_is_too_long_than_shows_that_it_is(forger, tmp_path):
    for version in (2, LAST):
        shutil.rmtree(forger.folder / keys.round_prefix(0, version))
    void, before = b"x" * (4 * 2**20 + 10), Forger(forger.folder, 1)
    (forger.folder / keys.commit(0, 1)).write_bytes(void)
    (forger.folder / keys.round_prefix(0, 2)).mkdir()
    previous = sha256_hex(void[: 4 * 2**20 + 1])
    after = before.changed(version=2, previous=previous, voids=(1,), taken=(), num_parts=0)
    (forger.folder / keys.commit(0, 2)).write_bytes(after)
    assert both(forger.folder)[0].voids.keys() == {(0, 1)}


ADMISSIONS = {
    "its committer as a guest": ({"guests": ("a", "b")}, "a", OWNER, True),
    "other keys": ({"keys": {"a": KEYS["b"].public}}, "a", OWNER, True),
    "another number": ({"number": 4}, "a", OWNER, True),
    "another's signature": ({}, "a", KEYS["a"], True),
}


@pytest.mark.parametrize("kind", ADMISSIONS)
def test_the_reader_and_verify_agree_on_a_commit_under_an_admission_with(forger, kind):
    fields, committer, by, is_void = ADMISSIONS[kind]
    offers, guests = forger.offers().values(), fields.get("guests", "c")
    data = forger.taking(offers, guests, committer=committer, **forger.admission(by, **fields) | {"admissions": 3})
    (forger.folder / keys.commit(0, LAST)).write_bytes(data)
    reading, _ = both(forger.folder)
    assert reading.voids.keys() == ({(0, LAST)} if is_void else set()), reading.voids


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One round of five parts, in a run with keys."""
    folder = tmp_path_factory.mktemp("sliced")
    Play(folder, "abcde", signed=True, quorum=5, codec="int8").rounds(1, fragments=1)
    return folder


@pytest.fixture
def reducer(sliced: Path, tmp_path: Path) -> Forger:
    """One for a copy of that run."""
    shutil.copytree(sliced, tmp_path / "run")
    return Forger(tmp_path / "run", 0)


def set_code_to_128(data: bytearray) -> None:
    data[-1] = 0x80


ZEROS: dict[str, tuple[str, Callable[[Forger], object]]] = {
    "no JSON": ("is no part's record", lambda forger: (forger.folder / keys.merged(0, 0, 2)).write_bytes(b"{")),
    "another fragment": ("another place", lambda forger: forger.part(2, fragment=1)),
    "another round": ("another place", lambda forger: forger.part(2, version=1)),
    "another part": ("another place", lambda forger: forger.part(2, part=1)),
    "another commit": ("stands on commit", lambda forger: forger.part(2, commit_sha="0" * 64)),
    "another's signature": ("has a signature that is not", lambda forger: forger.part(2, by="f")),
    "a stranger": ("has no admitted key", lambda forger: forger.part(2, reducer="f")),
    "a stranger left out": (
        "the commit doesn't take",
        lambda forger: forger.part(2, excluded=(Refused(site="f", why=""),)),
    ),
    "one left out twice": ("or not in order", lambda forger: forger.part(2, excluded=(Refused(site="a", why=""),) * 2)),
    "all left out, and a payload": ("no offer is left to merge", lambda forger: forger.part(2, excluded=ALL_OUT)),
    "no payload": ("though offers are left to merge", lambda forger: forger.part(2, payload=None)),
    "no hash": ("not that of its sha256", lambda forger: forger.part(2, sha256=None)),
    "another payload": (
        "not that of its sha256",
        lambda forger: forger.part(2, payload=keys.merged_payload(0, 0, 1, "0" * 64)),
    ),
    "another size": ("a sound part has", lambda forger: forger.part(2, nbytes=1)),
}
"""Records that don't follow: nobody is at fault that anyone could name, and the part is one of zeros."""

LIES: dict[str, Callable[[Forger], object]] = {
    "other values": lambda forger: forger.merged_bytes(2, lambda data: data.reverse()),
    "bytes that don't decode": lambda forger: forger.merged_bytes(2, set_code_to_128),
    "a sound offer left out": lambda forger: forger.part(2, excluded=(Refused(site="b", why="mine is better"),)),
    "all offers left out": lambda forger: forger.part(2, excluded=ALL_OUT, payload=None, sha256=None, nbytes=0),
}
"""Records that follow, and aren't what the offers make: `verify` names the reducer."""


@pytest.mark.parametrize("kind", ZEROS)
def test_the_reader_and_the_code_agree_that_a_part_counts_as_zeros_with(reducer, caplog, kind):
    before, (why, forgery) = read_run(reducer.folder).masters, ZEROS[kind]
    forgery(reducer)
    reading, verdict = both(reducer.folder)
    assert (reading.wrong, verdict.wrong) == ([], [])
    assert reading.zeros.keys() == {(0, 0, 2)} and reading.masters[0, 1] != before[0, 1]
    assert why in next(text for text in caplog.messages if text.startswith("part_void"))


@pytest.mark.parametrize("kind", LIES)
def test_the_reader_and_verify_agree_that_a_reducer_lied_with(reducer, kind):
    LIES[kind](reducer)
    reading, verdict = read_run(reducer.folder), verify(reducer.folder)
    assert [wrong.split(":")[0] for wrong in reading.wrong] == [keys.merged(0, 0, 2)]
    assert keys.merged(0, 0, 2) in verdict.wrong[0] and len(verdict.wrong) == 1
