"""Changed records in a copy of a run, weighed, named and signed as sound ones are: one thing is wrong in each."""

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from composer_prime.store import keys, open_store
from composer_prime.sync.canonical import PROTOCOL, Signed, canonical, sha256_hex
from composer_prime.sync.records import Admission, Commit, Offer, Part, Taken
from composer_prime.sync.run import load_run
from composer_prime.sync.signatures import SigningKey
from tests.spec.arithmetic import multipliers
from tests.spec.runs import KEYS

S = TypeVar("S", bound=Signed)

PAYLOAD_FIELDS = ("sha256", "slices", "norms", "nbytes")


class Forger:
    """Makes records of the last round of fragment 0 anew, in a folder: of a run with keys whose guest is c."""

    def __init__(self, folder: Path, last: int) -> None:
        self.folder, self.last = folder, last
        self.run = load_run(open_store(f"file://{folder}"))
        self.commit = self._read_commit(last)

    def _read_commit(self, version: int) -> Commit:
        key = keys.commit(0, version)
        return Commit.from_bytes((self.folder / key).read_bytes(), key)

    def signed(self, record: S, by: str) -> S:
        """The record with the signature of a site's key, whoever it names."""
        key: SigningKey = KEYS[by]
        return record.model_copy(update={"signature": key.sign(record.message(self.run.sha256))})

    # --- offers -----------------------------------------------------------------------------------------------------

    def offers(self, back: int = 0) -> dict[str, Offer]:
        """What the commit took so many rounds before the last, by site."""
        return {entry.site: entry.offer for entry in self._read_commit(self.last - back).taken}

    def changed_offers(self, sites: Iterable[str], **changes: Any) -> list[Offer]:
        """The last round's offers, those of `sites` but for `changes`, signed, and put where their records stand."""
        found = []
        for site, offer in self.offers().items():
            if site in sites:
                offer = self.signed(offer.model_copy(update=changes), site)
                (self.folder / keys.offer(0, self.last, site)).write_bytes(offer.to_bytes())
            found.append(offer)
        return found

    def payload_of(self, site: str, back: int = 0, at: int = 0) -> dict[str, Any]:
        """Fields of an offer by a whose bytes are those of `site` from `back` rounds ago, stored `at` rounds ago."""
        theirs = self.offers(back)[site]
        key = keys.payload(0, self.last - at, "a", str(theirs.sha256))
        (self.folder / key).write_bytes((self.folder / str(theirs.payload)).read_bytes())
        return {name: getattr(theirs, name) for name in PAYLOAD_FIELDS} | {"payload": key}

    def zeros_of(self, site: str) -> dict[str, Any]:
        """Fields of an offer by `site` of nothing but zeros, in fp32."""
        plan = self.run.codings[0].plan
        hashes = [hashlib.sha256(bytes(4 * plan.size(index))).digest()[:20] for index in range(plan.num_slices)]
        sha = sha256_hex(b"".join(hashes))
        key = keys.payload(0, self.last, site, sha)
        (self.folder / key).write_bytes(bytes(4 * plan.numel))
        slices = base64.b64encode(b"".join(hashes)).decode()
        return {"payload": key, "sha256": sha, "slices": slices, "norms": (0.0,) * plan.num_slices}

    # --- commits ----------------------------------------------------------------------------------------------------

    def changed(self, **changes: Any) -> bytes:
        """The commit but for `changes`, signed by whom it names."""
        commit = self.commit.model_copy(update=changes)
        return self.signed(commit, commit.committer).to_bytes()

    def taking(self, offers: Iterable[Offer], guests: Collection[str] = "c", **changes: Any) -> bytes:
        """The commit of these offers, weighed by the rule, also where no site of ours would; `changes` as `changed`."""
        listed = list(offers)
        factors = multipliers([offer.model_dump() for offer in listed], self.run.terms.model_dump(), guests)
        entries = zip(listed, factors, strict=True)
        return self.changed(taken=tuple(Taken(offer=offer, multiplier=factor) for offer, factor in entries), **changes)

    def weighed(self, weigh: Callable[[float], float]) -> bytes:
        """The commit with other multipliers."""
        entries = self.commit.taken
        return self.changed(taken=tuple(e.model_copy(update={"multiplier": weigh(e.multiplier)}) for e in entries))

    def raw(self, change: Callable[[dict[str, Any]], object]) -> bytes:
        """The commit's fields as `change` leaves them, which no record of ours may hold, signed over as they are."""
        fields = json.loads(self.commit.to_bytes())
        change(fields)
        del fields["signature"]
        message = f"composer-prime/{PROTOCOL}/Commit/{self.run.sha256}\n".encode() + canonical(fields)
        return canonical(fields | {"signature": KEYS[self.commit.committer].sign(message)})

    def admission(self, by: SigningKey, **fields: Any) -> dict[str, Any]:
        """Put one more admission, of all sites, and return what a commit says that names it."""
        number = 1 + len(list((self.folder / "admissions").glob("*.json")))
        public = {name: key.public for name, key in KEYS.items()}
        record = Admission(**{"number": number, "keys": public} | fields)
        data = record.model_copy(update={"signature": by.sign(record.message(self.run.sha256))}).to_bytes()
        (self.folder / keys.admission(number)).write_bytes(data)
        return {"admissions": number, "admission_sha": sha256_hex(data)}

    # --- parts ------------------------------------------------------------------------------------------------------

    def part(self, index: int, by: str | None = None, **changes: Any) -> None:
        """Put the record of a part of the last round, but for `changes`, signed by its reducer or `by`."""
        path = self.folder / keys.merged(0, self.last, index)
        part = Part.from_bytes(path.read_bytes(), str(path)).model_copy(update=changes)
        path.write_bytes(self.signed(part, by or part.reducer).to_bytes())

    def merged_bytes(self, index: int, change: Callable[[bytearray], object]) -> None:
        """Change a part's payload, and name the new one in its record."""
        path = self.folder / keys.merged(0, self.last, index)
        data = bytearray((self.folder / str(Part.from_bytes(path.read_bytes(), "").payload)).read_bytes())
        change(data)
        sha = sha256_hex(bytes(data))
        key = keys.merged_payload(0, self.last, index, sha)
        (self.folder / key).write_bytes(data)
        self.part(index, payload=key, sha256=sha, nbytes=len(data))
