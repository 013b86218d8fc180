"""A run's masters and verdicts, rebuilt from a bucket's folder alone, by docs/protocol.md alone.

reading = read_run(folder)
reading.masters[fragment, version]    sha256 of master(f, v)
reading.voids[fragment, version]      why the commit of that round is void
reading.wrong                         objects that aren't what the log says of them
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.spec import arithmetic, layout, records, rules, signing
from tests.spec.codecs import Undecodable
from tests.spec.layout import Vector
from tests.spec.merging import Merger, Unfinished, round_key
from tests.spec.records import Unreadable
from tests.spec.rules import Log, Record
from tests.spec.signing import sha256


@dataclass(frozen=True)
class Stand:
    """What a close record says of one fragment at its version, if it is right."""

    master: str
    voids: list[int]


@dataclass
class Reading:
    """What came of a run."""

    rounds: int
    """Training rounds of each fragment."""
    masters: dict[tuple[int, int], str] = field(default_factory=dict)
    voids: dict[tuple[int, int], str] = field(default_factory=dict)
    zeros: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """Parts that count as zeros, by fragment, version and part, and why."""
    wrong: list[str] = field(default_factory=list)
    """Each begins with the key of the object."""
    stands: dict[tuple[int, int], Stand] = field(default_factory=dict)
    is_closed: bool = False
    """Whether the newest close record is there and says what the log says."""

    def versions(self, fragment: int) -> int:
        """The newest master of a fragment that could be rebuilt."""
        return max(version for index, version in self.masters if index == fragment)


def read_run(folder: Path) -> Reading:
    """Everything that the bucket says; Unreadable where its manifest can't be believed."""
    data = (folder / "manifest.json").read_bytes()
    manifest = records.read(records.MANIFEST, data)
    terms = manifest["terms"]
    blocks = layout.blocks_of(manifest["parameters"])
    if layout.fingerprint(blocks) != manifest["fingerprint"]:
        raise Unreadable("manifest.json: its fingerprint isn't that of its parameters")
    if not len(manifest["masters"]) == terms["fragments"] <= len(blocks):
        raise Unreadable("manifest.json: more fragments than blocks, or other masters")
    _ask_founding(folder, manifest)
    members = signing.read_members(manifest, sha256(data), _numbered(folder, "admissions"))
    reading = Reading(terms["rounds"])
    for fragment, size in enumerate(layout.fragment_sizes(blocks, terms["fragments"])):
        log = Log(fragment, layout.cut(size, terms), manifest["masters"][fragment], sha256(data))
        try:
            _follow(Merger(folder, terms, members, reading.wrong, reading.zeros), log, reading)
        except Unfinished as error:
            reading.wrong.append(str(error))
    reading.is_closed = _close_holds(folder, members, reading, terms["fragments"])
    return reading


def _numbered(folder: Path, kind: str) -> list[bytes]:
    """The owner's records of one kind, from number 1 to the first one that isn't there."""
    found: list[bytes] = []
    while (path := folder / kind / f"{len(found) + 1:04}.json").is_file():
        found.append(path.read_bytes())
    return found


def _ask_founding(folder: Path, manifest: Record) -> None:
    path = folder / "founding.json"
    if path.is_file():
        founding = records.read(records.FOUNDING, path.read_bytes())
        if any(manifest[name] != founding[name] for name in founding):
            raise Unreadable("manifest.json: differs from founding.json")


def _follow(merger: Merger, log: Log, reading: Reading) -> None:
    """Apply every commit of one fragment; what each round made goes into the reading."""
    members = merger.members
    master = _first_master(merger, log)
    _note(merger, log, reading)
    while log.version <= reading.rounds and (data := merger.get(round_key(log, "commit.json"))) is not None:
        data = data[: records.MAX_RECORD_BYTES + 1]
        commit, fault = _judged(merger, log, data)
        following = master
        if fault is None and commit is not None and commit["taken"]:
            following, fault = _step(merger, log, commit, sha256(data), master)
        if fault is not None:
            reading.voids[log.fragment, log.version] = fault
            log.voids.append(log.version)
        elif commit is not None:
            log.taken += [rules.Taken(log.version, each["offer"]) for each in commit["taken"]]
        if commit is not None and rules.honours(commit, members) is not None:
            log.floor = max(log.floor, commit["admissions"])
        master = following
        log.previous, log.version, log.master_sha = sha256(data), log.version + 1, layout.master_sha(master)
        _note(merger, log, reading)


def _step(
    merger: Merger, log: Log, commit: Record, commit_sha: str, master: list[Vector]
) -> tuple[list[Vector], str | None]:
    """What a sound commit makes of the master, or why it makes none."""
    try:
        following = arithmetic.outer_step(master, merger.merged(log, commit, commit_sha), merger.terms)
    except Undecodable as error:
        return master, f"takes a payload that is none: {error}"
    if not all(np.isfinite(vector).all() for vector in following):
        return master, "makes a master that isn't finite"
    return following, None


def _first_master(merger: Merger, log: Log) -> list[Vector]:
    key = _snapshot_key(log)
    try:
        master = layout.decode_master(merger.need(key), log.size, merger.num_vectors)
    except layout.BadMaster as error:
        raise Unfinished(f"{key}: {error}") from error
    if layout.master_sha(master) != log.master_sha:
        raise Unfinished(f"{key}: other values than the manifest says")
    return master


def _judged(merger: Merger, log: Log, data: bytes) -> tuple[Record | None, str | None]:
    try:
        commit = records.read(records.COMMIT, data)
    except Unreadable as error:
        return None, f"can't be read: {error}"
    return commit, rules.commit_fault(commit, log, merger.terms, merger.members)


def _snapshot_key(log: Log) -> str:
    return f"masters/{log.fragment:04}/{log.version:08}-{log.master_sha[:16]}"


def _note(merger: Merger, log: Log, reading: Reading) -> None:
    """Write down what stands now, and compare it with the snapshot of it, where one is stored."""
    place = (log.fragment, log.version)
    reading.masters[place] = log.master_sha
    reading.stands[place] = Stand(log.master_sha, log.recent_voids(merger.terms))
    key = _snapshot_key(log)
    stored = merger.get(key)
    if stored is None:
        return
    try:
        if layout.master_sha(layout.decode_master(stored, log.size, merger.num_vectors)) != log.master_sha:
            reading.wrong.append(f"{key}: other values than its name says")
    except layout.BadMaster as error:
        reading.wrong.append(f"{key}: {error}")


def _close_holds(folder: Path, members: signing.Members, reading: Reading, num_fragments: int) -> bool:
    """Whether a close record is there, can be believed, and names what the log makes."""
    key, end = "close.json", reading.rounds + 1
    path = folder / key
    if not path.is_file():
        return False
    try:
        close = records.read(records.CLOSE, path.read_bytes())
    except Unreadable as error:
        reading.wrong.append(f"{key}: can't be read: {error}")
        return False
    site = close["closed_by"]
    if set(close["versions"]) != {end}:
        reading.wrong.append(f"{key}: ends at other versions than {end}")
        return False
    if not any(members.may_close(each, site, "Close", close) for each in members.admissions):
        reading.wrong.append(f"{key}: isn't signed by a site that may close the run")
        return False
    stated = [
        ((fragment, version), Stand(master, voids))
        for fragment, (version, master, voids) in enumerate(
            zip(close["versions"], close["masters"], close["voids"], strict=False)
        )
    ]
    differ = [place for place, stand in stated if reading.stands.get(place) != stand]
    reading.wrong += [f"{key}: other than the log at {place}" for place in differ]
    return not differ and len(stated) == num_fragments
