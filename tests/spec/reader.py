"""A run's masters and verdicts, rebuilt from a bucket's folder alone, by docs/protocol.md alone.

reading = read_run(folder)
reading.masters[fragment, version]    sha256 of master(f, v)
reading.voids[fragment, version]      why the commit of that round is void
reading.wrong                         objects that aren't what the log says of them
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.spec import arithmetic, codecs, layout, records, rules, signing
from tests.spec.records import Unreadable
from tests.spec.signing import Members, sha256

Vector = npt.NDArray[np.float32]
Record = dict[str, Any]


class Unfinished(Exception):
    """An object is missing or changed without which a round can't be rebuilt. It is named."""


@dataclass
class Reading:
    """What came of a run."""

    masters: dict[tuple[int, int], str] = field(default_factory=dict)
    voids: dict[tuple[int, int], str] = field(default_factory=dict)
    zeros: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """Parts that count as zeros, by fragment, version and part, and why."""
    wrong: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of each fragment, the first round without a commit, or which can't be rebuilt."""
    rounds: int = 0
    closed: bool = False
    """A close record that can be believed names these versions and masters."""


@dataclass(frozen=True)
class _Run:
    """What holds for all fragments."""

    folder: Path
    manifest_sha: str
    terms: Record
    members: Members
    reading: Reading

    def get(self, key: str) -> bytes | None:
        path = self.folder / key
        return path.read_bytes() if path.is_file() else None

    def need(self, key: str) -> bytes:
        data = self.get(key)
        if data is None:
            raise Unfinished(f"{key}: missing")
        return data


def read_run(folder: Path) -> Reading:
    """Everything that the bucket says; Unreadable where its manifest can't be believed."""
    data = (folder / "manifest.json").read_bytes()
    manifest = records.read(records.MANIFEST, data)
    terms = manifest["terms"]
    blocks = layout.blocks_of(manifest["parameters"])
    if layout.fingerprint(blocks) != manifest["fingerprint"] or len(manifest["masters"]) != terms["fragments"]:
        raise Unreadable("manifest.json: parameters that aren't those of its fingerprint, or masters missing")
    _ask_founding(folder, manifest)
    members = signing.read_members(manifest, sha256(data), _numbered(folder, "admissions"))
    run = _Run(folder, sha256(data), terms, members, Reading())
    reading = run.reading
    reading.rounds = signing.read_rounds(members, terms["rounds"], _numbered(folder, "reopen"))
    logs = []
    for fragment, size in enumerate(layout.fragment_sizes(blocks, terms["fragments"])):
        slices = layout.cut(size, terms)
        log = rules.Log(fragment, slices, manifest["masters"][fragment], run.manifest_sha)
        try:
            _follow(run, log, size)
        except Unfinished as error:
            reading.wrong.append(str(error))
        reading.versions.append(log.version)
        logs.append(log)
    reading.closed = _close_holds(run, logs, _numbered(folder, "reopen"))
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


def _follow(run: _Run, log: rules.Log, size: int) -> None:
    """Apply every commit of one fragment; what each round made goes into the reading."""
    terms, reading = run.terms, run.reading
    num_vectors = 2 if terms["momentum"] > 0 else 1
    key = f"masters/{log.fragment:04}/{0:08}-{log.master_sha[:16]}"
    try:
        master = layout.decode_master(run.need(key), size, num_vectors)
    except layout.BadMaster as error:
        raise Unfinished(f"{key}: {error}") from error
    if layout.master_sha(master) != log.master_sha:
        raise Unfinished(f"{key}: other values than the manifest says")
    reading.masters[log.fragment, 0] = log.master_sha
    while (data := run.get(_round_key(log, "commit.json"))) is not None:
        commit, fault = _judged(run, log, data)
        made: list[Vector] | None = None
        if fault is None and commit is not None and commit["taken"]:
            merged, fault = _merged(run, log, commit, sha256(data))
            made = arithmetic.outer_step(master, merged, terms) if merged is not None else None
            if made is not None and not all(np.isfinite(vector).all() for vector in (merged, *made)):
                made, fault = None, "a merge that isn't finite"
        if fault is not None:
            reading.voids[log.fragment, log.version] = fault
            log.voids.append(log.version)
        elif commit is not None:
            log.taken += [rules.Taken(log.version, each["offer"]) for each in commit["taken"]]
        if commit is not None and rules.honours(commit, run.members) is not None:
            log.floor = max(log.floor, commit["admissions"])
        master = master if made is None else made
        log.previous, log.version = sha256(data), log.version + 1
        log.master_sha = layout.master_sha(master)
        reading.masters[log.fragment, log.version] = log.master_sha
        _ask_snapshot(run, log, size, num_vectors)


def _round_key(log: rules.Log, name: str) -> str:
    return f"rounds/{log.fragment:04}/{log.version:08}/{name}"


def _judged(run: _Run, log: rules.Log, data: bytes) -> tuple[Record | None, str | None]:
    try:
        commit = records.read(records.COMMIT, data)
    except Unreadable as error:
        return None, f"can't be read: {error}"
    return commit, rules.commit_fault(commit, log, run.terms, run.members)


def _ask_snapshot(run: _Run, log: rules.Log, size: int, num_vectors: int) -> None:
    key = f"masters/{log.fragment:04}/{log.version:08}-{log.master_sha[:16]}"
    stored = run.get(key)
    if stored is None:
        return
    try:
        if layout.master_sha(layout.decode_master(stored, size, num_vectors)) != log.master_sha:
            run.reading.wrong.append(f"{key}: other values than its name says")
    except layout.BadMaster as error:
        run.reading.wrong.append(f"{key}: {error}")


def _merged(run: _Run, log: rules.Log, commit: Record, commit_sha: str) -> tuple[Vector | None, str | None]:
    """The round's merged movement, or why it is void."""
    if commit["num_parts"]:
        parts = [_part(run, log, commit, commit_sha, index) for index in range(commit["num_parts"])]
        return np.concatenate(parts), None
    vectors = []
    for offer in (each["offer"] for each in commit["taken"]):
        data = run.need(offer["payload"])
        hashes = rules.slice_hashes(offer)
        for (at, length), expected in zip(rules.slice_sizes(offer, log, run.terms), hashes, strict=True):
            if rules.slice_hash(data[at : at + length]) != expected or len(data) != offer["nbytes"]:
                raise Unfinished(f"{offer['payload']}: other bytes than its offer says")
        try:
            vectors.append(np.concatenate(_decoded(run, log, offer, data, range(len(log.slices)))))
        except codecs.Undecodable as error:
            return None, f"a payload of {offer['site']} that doesn't decode: {error}"
    factors = [each["multiplier"] for each in commit["taken"]]
    return arithmetic.merge(vectors, factors, run.terms), None


def _decoded(run: _Run, log: rules.Log, offer: Record, data: bytes, wanted: range) -> list[Vector]:
    """Some slices of a payload; Undecodable where one has another hash or norm, or isn't in its codec's form."""
    cuts, sizes, hashes = list(rules.slice_sizes(offer, log, run.terms)), log.slices.sizes(), rules.slice_hashes(offer)
    found = []
    for index in wanted:
        at, length = cuts[index]
        piece = data[at : at + length]
        if len(piece) != length or rules.slice_hash(piece) != hashes[index]:
            raise codecs.Undecodable(f"slice {index} has another hash")
        values = codecs.decode(run.terms["codec"], piece, sizes[index])
        norm = float(f"{np.linalg.norm(values.astype(np.float64)):.4e}")
        if abs(offer["norms"][index] - norm) > 1e-4 * norm + 1e-30:
            raise codecs.Undecodable(f"slice {index} has another norm")
        found.append(values)
    return found


def _part(run: _Run, log: rules.Log, commit: Record, commit_sha: str, index: int) -> Vector:
    """The values of one part, zeros where its record or payload don't count."""
    size = sum(log.slices.sizes()[each] for each in log.slices.part(index, commit["num_parts"]))
    place = (log.fragment, log.version, index)
    try:
        part = records.read(records.PART, run.need(_round_key(log, f"merged/{index:04}.json")))
        fault = rules.part_fault(part, index, commit, commit_sha, log, run.terms, run.members)
    except Unreadable as error:
        part, fault = None, f"can't be read: {error}"
    if part is None or fault is not None:
        run.reading.zeros[place] = fault or ""
        return np.zeros(size, np.float32)
    again, left_out = _merged_again(run, log, commit, part)
    own = None if again is None else codecs.encode_merged(run.terms["merged_codec"], again)
    stated = [each["site"] for each in part["excluded"]]
    lied = stated != left_out or (own is not None and sha256(own) != part["sha256"])
    if lied:
        run.reading.wrong.append(f"{_round_key(log, f'merged/{index:04}.json')}: not what its offers make")
    if part["payload"] is None:
        return np.zeros(size, np.float32)
    data = run.get(part["payload"])
    if data is None or sha256(data) != part["sha256"]:
        run.reading.wrong.append(f"{part['payload']}: missing, or other bytes than its record says")
        if own is None or sha256(own) != part["sha256"]:
            raise Unfinished(f"{part['payload']}: can't be made again")
        data = own
    try:
        return codecs.decode(run.terms["merged_codec"], data, size)
    except codecs.Undecodable as error:
        run.reading.zeros[place] = str(error)
        return np.zeros(size, np.float32)


def _merged_again(run: _Run, log: rules.Log, commit: Record, part: Record) -> tuple[Vector | None, list[str]]:
    """What the offers that a part's record leaves in make, None if one doesn't hold; and the sites that don't hold."""
    wanted = log.slices.part(part["part"], commit["num_parts"])
    stated = {each["site"] for each in part["excluded"]}
    last = part["part"] == commit["num_parts"] - 1
    offers, vectors, left_out = [], [], []
    whole = True
    for offer in (each["offer"] for each in commit["taken"]):
        try:
            data = run.get(offer["payload"]) or b""
            if last and len(data) > offer["nbytes"]:
                raise codecs.Undecodable("goes on behind its last slice")
            pieces = _decoded(run, log, offer, data, wanted)
        except codecs.Undecodable:
            left_out.append(offer["site"])
            whole &= offer["site"] in stated
            continue
        if offer["site"] not in stated:
            offers.append(offer)
            vectors.append(np.concatenate(pieces))
    if not whole or not offers:
        return None, left_out
    return arithmetic.merge(vectors, arithmetic.multipliers(offers, run.terms), run.terms), left_out


def _close_holds(run: _Run, logs: list[rules.Log], reopenings: list[bytes]) -> bool:
    """Whether the newest close record is there, can be believed, and names what the log makes."""
    number = len(reopenings)
    data = run.get("close.json" if number == 0 else f"close-{number:04}.json")
    if data is None:
        return False
    try:
        close = records.read(records.CLOSE, data)
    except Unreadable as error:
        run.reading.wrong.append(f"close record {number}: can't be read: {error}")
        return False
    expected = {
        "number": number,
        "versions": [log.version for log in logs],
        "masters": [log.master_sha for log in logs],
        "voids": [[void for void in log.voids if void in log.window(run.terms)] for log in logs],
        "floors": [log.floor for log in logs],
    }
    site = close["closed_by"]
    if not any(run.members.may_close(each, site, "Close", close) for each in run.members.admissions):
        run.reading.wrong.append(f"close record {number}: isn't signed by a site that may close the run")
        return False
    differs = [name for name, value in expected.items() if close[name] != value]
    run.reading.wrong += [f"close record {number}: other {name} than the log's" for name in differs]
    return not differs
