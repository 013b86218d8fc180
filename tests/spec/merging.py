"""The payloads and parts of one round: what a sound commit takes, as one movement.

What is missing or changed is told apart from what is void: nothing here depends on a clock, and no round is skipped.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.spec import arithmetic, codecs, records, rules
from tests.spec.layout import Vector
from tests.spec.records import Unreadable
from tests.spec.rules import Log, Record
from tests.spec.signing import Members, sha256


class OtherBytes(codecs.Undecodable):
    """Bytes that aren't those that were hashed."""


class Unfinished(Exception):
    """An object is missing or changed without which a round can't be rebuilt. The message begins with its key."""


def round_key(log: Log, name: str) -> str:
    """The key of an object of the round that is open in `log`."""
    return f"rounds/{log.fragment:04}/{log.version:08}/{name}"


@dataclass(frozen=True)
class Merger:
    """Reads one bucket. `wrong` and `zeros` are the reading's, and filled here."""

    folder: Path
    terms: Record
    members: Members
    wrong: list[str]
    zeros: dict[tuple[int, int, int], str]

    @property
    def num_vectors(self) -> int:
        """Vectors in a master."""
        return 2 if self.terms["momentum"] > 0 else 1

    def get(self, key: str) -> bytes | None:
        """The object at `key`, if there is one."""
        path = self.folder / key
        return path.read_bytes() if path.is_file() else None

    def need(self, key: str) -> bytes:
        """The object at `key`; Unfinished without."""
        data = self.get(key)
        if data is None:
            raise Unfinished(f"{key}: missing")
        return data

    def merged(self, log: Log, commit: Record, commit_sha: str) -> Vector:
        """fp32 movement of the round that `commit` closes; Unfinished where it can't be made."""
        offers = [each["offer"] for each in commit["taken"]]
        found = [] if commit["num_parts"] else [self._try_whole(log, offer) for offer in offers]
        for offer in offers:
            self._ask_record(log, offer)
        if commit["num_parts"]:
            parts = [self._part(log, commit, commit_sha, index) for index in range(commit["num_parts"])]
            return np.concatenate(parts)
        vectors = []
        for each in found:
            if isinstance(each, Unfinished):
                raise each
            vectors.append(each)
        return self._merge(commit, offers, vectors, [each["multiplier"] for each in commit["taken"]])

    def _merge(self, commit: Record, offers: list[Record], vectors: list[Vector], factors: list[float]) -> Vector:
        guests = self.members.admissions[commit["admissions"]].guests
        return arithmetic.merge(vectors, factors, [offer["site"] in guests for offer in offers], self.terms)

    def _try_whole(self, log: Log, offer: Record) -> Vector | Unfinished:
        """As `_whole`, but what is for now is no reason not to look at the others: Undecodable is for ever."""
        try:
            return self._whole(log, offer)
        except Unfinished as error:
            return error

    def _whole(self, log: Log, offer: Record) -> Vector:
        """A payload's values. Unfinished as long as its bytes aren't those that the offer names; Undecodable, and that
        is for ever, where they are and break a rule."""
        data = self.need(offer["payload"])
        if len(data) != offer["nbytes"]:
            raise Unfinished(f"{offer['payload']}: has {len(data)} bytes, its offer says {offer['nbytes']}")
        try:
            return np.concatenate(self._decoded(log, offer, data, range(len(log.slices))))
        except OtherBytes as error:
            raise Unfinished(f"{offer['payload']}: isn't what its offer says: {error}") from error

    def _ask_record(self, log: Log, offer: Record) -> None:
        """The offer's own record should be what the commit took; nothing depends on it any more."""
        key = round_key(log, f"offers/{offer['site']}.json")
        if self.get(key) != records.canonical(offer):
            self.wrong.append(f"{key}: isn't the offer that the commit took")

    def _slice_bytes(self, log: Log, offer: Record) -> Iterator[tuple[int, int]]:
        """Where each slice's bytes begin and how many there are."""
        at = 0
        for size in log.slices.sizes():
            least, most = codecs.size_bounds(self.terms["codec"], size)
            num_bytes = least if least == most else offer["nbytes"]
            yield at, num_bytes
            at += num_bytes

    def _decoded(self, log: Log, offer: Record, data: bytes, wanted: range) -> list[Vector]:
        """Some slices of a payload; Undecodable where one has another hash or norm, or isn't in its codec's form."""
        cuts, sizes, hashes = list(self._slice_bytes(log, offer)), log.slices.sizes(), rules.slice_hashes(offer)
        found = []
        for index in wanted:
            at, length = cuts[index]
            piece = data[at : at + length]
            if len(piece) != length or rules.slice_hash(piece) != hashes[index]:
                raise OtherBytes(f"slice {index} has another hash")
            values = codecs.decode(self.terms["codec"], piece, sizes[index])
            norm = math.sqrt(math.fsum(np.square(values.astype(np.float64)).tolist()))
            if abs(offer["norms"][index] - norm) > 1e-4 * norm + 1e-30:
                raise codecs.Undecodable(f"slice {index} has another norm")
            found.append(values)
        return found

    # --- parts ------------------------------------------------------------------------------------------------------

    def _part(self, log: Log, commit: Record, commit_sha: str, index: int) -> Vector:
        """The values of one part, zeros where its record or payload don't count."""
        size, key = log.part_size(index, commit["num_parts"]), round_key(log, f"merged/{index:04}.json")
        part, fault = None, None
        try:
            part = records.read(records.PART, self.need(key))
            fault = rules.part_fault(part, index, commit, commit_sha, log, self.terms, self.members)
        except Unreadable as error:
            fault = f"can't be read: {error}"
        if part is None or fault is not None:
            return self._zeros(log, index, size, fault)
        if part["payload"] is None and self._has_no_code(log, commit, part):
            return np.zeros(size, np.float32)
        again, left_out = self._merged_again(log, commit, part, {each["site"] for each in part["excluded"]})
        coded = None if again is None else codecs.encode(codecs.MERGED, again)
        made = None if coded is None else sha256(coded)
        if [each["site"] for each in part["excluded"]] != left_out or made != part["sha256"]:
            self.wrong.append(f"{key}: isn't what its offers make")
        if part["payload"] is None:
            return np.zeros(size, np.float32)
        data = self.get(part["payload"])
        if data is None or sha256(data) != part["sha256"]:
            self.wrong.append(f"{part['payload']}: missing, or other bytes than its record says")
            if coded is None or made != part["sha256"]:
                raise Unfinished(f"{part['payload']}: can't be made again")
            data = coded
        try:
            return codecs.decode(codecs.MERGED, data, size)
        except codecs.Undecodable as error:
            return self._zeros(log, index, size, str(error))

    def _zeros(self, log: Log, index: int, size: int, fault: str | None) -> Vector:
        self.zeros[log.fragment, log.version, index] = fault or ""
        return np.zeros(size, np.float32)

    def _has_no_code(self, log: Log, commit: Record, part: Record) -> bool:
        """Whether the offers that hold make values which the merged codec has no code for."""
        _, left_out = self._merged_again(log, commit, part, set())
        again, _ = self._merged_again(log, commit, part, set(left_out))
        return again is not None and codecs.encode(codecs.MERGED, again) is None

    def _merged_again(
        self, log: Log, commit: Record, part: Record, stated: set[str]
    ) -> tuple[Vector | None, list[str]]:
        """What the offers but those `stated` make in a part, None if one doesn't hold; and who doesn't hold."""
        wanted = log.slices.part(part["part"], commit["num_parts"])
        is_last = part["part"] == commit["num_parts"] - 1
        offers, vectors, left_out, is_whole = [], [], [], True
        for offer in (each["offer"] for each in commit["taken"]):
            try:
                data = self.get(offer["payload"]) or b""
                if is_last and len(data) > offer["nbytes"]:
                    raise codecs.Undecodable("goes on behind its last slice")
                pieces = self._decoded(log, offer, data, wanted)
            except codecs.Undecodable:
                left_out.append(offer["site"])
                is_whole &= offer["site"] in stated
                continue
            if offer["site"] not in stated:
                offers.append(offer)
                vectors.append(np.concatenate(pieces))
        if not is_whole or not offers:
            return None, left_out
        guests = self.members.admissions[commit["admissions"]].guests
        factors = arithmetic.multipliers(offers, self.terms, guests)
        return self._merge(commit, offers, vectors, factors), left_out
