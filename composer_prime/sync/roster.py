"""Who may sign what in a run: keys of the manifest and of the owner's later admissions, and who is a guest (rule 14).

A commit names the last admission record that it honours, so all readers judge it, and the offers it takes, by the same
keys, whenever they read it.
"""

import logging
import threading
from collections.abc import Mapping
from typing import TypeVar

from composer_prime.errors import ConfigError, CorruptObject, KeyMissing, SiteRevoked
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.admitted import AdmittedBy
from composer_prime.sync.canonical import Signed, sha256_hex
from composer_prime.sync.protocol import guest_fault
from composer_prime.sync.reading import read_bytes
from composer_prime.sync.records import Admission, Commit, Manifest
from composer_prime.sync.signatures import SigningKey, verify

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Signed)


class Roster:
    """The run's keys, by admission number, and this process's own."""

    def __init__(self, store: Store, manifest: Manifest, run_sha: str, key: SigningKey | None = None) -> None:
        self._store = store
        self._run_sha = run_sha
        self._owner = manifest.owner
        self._key = key
        self._lock = threading.Lock()
        self._by = AdmittedBy(Admission(number=1, keys=manifest.keys))
        self._shas: list[str | None] = [None]
        """sha256 of each record's bytes; None where there is none of the owner's."""
        self.signed = manifest.owner is not None or bool(manifest.keys)
        """Whether records need signatures in this run."""

    def check_admitted(self, site: str) -> None:
        """Raise ConfigError, saying what to do, unless this process may sign as `site`; SiteRevoked where it might."""
        self.refresh()
        if not self.signed:
            return
        admitted = self._by.keys.get(site)
        if self._key is None:
            raise ConfigError(f"this run admits keys, and site {site} has none: set site.key_file to its key file")
        if admitted is None and site == self.held_by(self._key.public):
            raise SiteRevoked.of(site)
        if admitted != self._key.public:
            held = "is not admitted" if admitted is None else f"is admitted with {admitted}"
            raise ConfigError(
                f"site {site} {held}, its key file holds {self._key.public}: ask the run's owner to admit that key"
            )

    @property
    def newest(self) -> int:
        """The number of the last admission record read so far; 0: the manifest's own list."""
        return self._by.newest

    def refresh(self) -> int:
        """Read admission records that are new, and return the number of the last one; 0: the manifest's own list.

        From any thread.
        """
        while (found := self._read(number := self.newest + 1)) is not None:
            admission, sha = found
            with self._lock:  # several threads may have read that one at once
                if number == self.newest + 1:
                    self._shas.append(sha)
                    self._by.add(admission)
        return self.newest

    @property
    def honoured(self) -> tuple[int, str | None]:
        """What a commit made now names: number and sha256 of the owner's last record; 0 and None: the manifest."""
        number = next((number for number in range(self.newest, 0, -1) if self._shas[number] is not None), 0)
        return number, self._shas[number]

    def admitted(self) -> Mapping[str, str]:
        """Public key by site, as the last admission record read so far has it."""
        return self._by.keys

    def held_by(self, public: str) -> str | None:
        """The site that has, or was the last one to have, that key; None: nobody ever had it."""
        return self._by.held_by(public)

    def last_admission_of(self, site: str) -> int | None:
        """The number of the last admission record, of those read so far, that has the site; None: none has."""
        return self._by.last_of(site)

    def author_fault(self, commit: Commit) -> str | None:
        """Why no site made this commit that may commit under the admission record it names; None when one did.

        In a run with an owner the same at any time: a commit names the record by its bytes, which only the owner makes,
        so that none which comes later makes it sound.
        """
        number = commit.admissions
        if number > self.newest and number > self.refresh():
            return f"honours admission {number}, which isn't there"
        if commit.admission_sha != self._shas[number] or (number > 0 and self._shas[number] is None):
            return f"honours another admission {number} than the one that the owner signed"
        fault = guest_fault(commit.committer, self.guests(number), "made")
        return fault or self.fault(commit, commit.committer, number)

    def guests(self, number: int | None = None) -> frozenset[str]:
        """Sites that may only offer under that admission record (None: the last one known)."""
        return self._by.guests(self.newest if number is None else number)

    def sign(self, record: S) -> S:
        """The record with this process's signature, where the run asks for one."""
        if not self.signed or self._key is None:
            return record
        return record.model_copy(update={"signature": self._key.sign(record.message(self._run_sha))})

    def fault(self, record: Signed, site: str, number: int | None = None) -> str | None:
        """Why this record isn't one that `site` signed under that admission record (None: the last known one)."""
        if not self.signed:
            return None
        public = self._by.key_of(site, self.newest if number is None else number)
        return self._unsigned(record, site, public)

    def owner_fault(self, record: Signed) -> str | None:
        """Why this record isn't one that the run's owner signed; None in a run without keys: there anyone is owner."""
        if self._owner is None:
            return "can't be: the run admits keys and names no owner" if self.signed else None
        return self._unsigned(record, "the owner", self._owner)

    def _unsigned(self, record: Signed, who: str, public: str | None) -> str | None:
        if public is None:
            return f"{who} has no admitted key"
        if record.signature is None:
            return f"is not signed, {who} has the key {public}"
        if not verify(public, record.message(self._run_sha), record.signature):
            return f"has a signature that is not {who}'s"
        return None

    def _read(self, number: int) -> tuple[Admission | None, str | None] | None:
        """The admission record of that number and its sha256; None for both where it isn't the owner's."""
        key = keys.admission(number)
        try:
            data = read_bytes(self._store, key)
        except KeyMissing:
            return None
        try:
            record = Admission.from_bytes(data, key)
            fault = f"says that it is number {record.number}" if record.number != number else self.owner_fault(record)
        except CorruptObject as error:
            record, fault = None, str(error)
        if record is not None and fault is None:
            return record, sha256_hex(data)
        logger.error("admission_void number=%d fault=%s", number, fault)
        return None, None
