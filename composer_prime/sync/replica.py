"""This site's copy of one fragment's master, moved forward by the log alone (rule 1).

Nothing local enters here: two replicas that have read the same log hold the same bytes, on any machine.
"""

import logging
from dataclasses import dataclass

from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing, MasterMismatch, StoreError
from composer_prime.outer.aggregate import weighted_mean
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.outer_optimizer import nesterov_step
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.protocol import commit_fault
from composer_prime.sync.records import Commit, Manifest, Offer, Taken, sha256_hex
from composer_prime.sync.snapshots import Master, newest_master, previous_sha

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """A round that has closed, as this replica read it. `fault` says why a faulty commit counts as void."""

    fragment: int
    version: int
    taken: tuple[Taken, ...]
    refused: dict[str, str]
    fault: str | None

    def took(self, site: str, payload: str) -> bool:
        """Whether the round merged that payload of that site."""
        return any(entry.site == site and entry.payload == payload for entry in self.taken)


class Payloads:
    """Fetches, checks and decodes the payloads of one fragment; keeps those of the open round, which are read twice."""

    def __init__(self, store: Store, codec: str, numel: int) -> None:
        self._store = store
        self._codec = get_codec(codec)
        self._numel = numel
        self._decoded: dict[str, Tensor] = {}

    def fetch(self, payload: str, sha256: str) -> Tensor:
        """The decoded pseudo-gradient at `payload`: fp32, 1-D. Raises CorruptObject on bytes of another sha256."""
        known = self._decoded.get(payload)
        if known is not None:
            return known
        return self.add(payload, sha256, self._store.get(payload))

    def add(self, payload: str, sha256: str, data: bytes) -> Tensor:
        """Decode bytes that are at hand, checked as fetched ones are."""
        found = sha256_hex(data)
        if found != sha256:
            raise CorruptObject(f"{payload} has sha256 {found[:16]}, its record says {sha256[:16]}")
        self._decoded[payload] = decoded = self._codec.decode(data, self._numel)
        return decoded

    def forget(self) -> None:
        """Free what is kept; called when a round has closed."""
        self._decoded.clear()


class Replica:
    """One fragment's master and the log behind it. Not thread-safe: one owner moves it; others may read `master`."""

    def __init__(
        self, store: Store, manifest: Manifest, manifest_sha: str, fragment: int, numel: int, at_most: int | None = None
    ) -> None:
        """Start from the newest vouched snapshot, none above version `at_most`; `advance` moves on along the log."""
        self._store = store
        self._manifest = manifest
        self._manifest_sha = manifest_sha
        self.fragment = fragment
        self.numel = numel
        self.payloads = Payloads(store, manifest.terms.codec, numel)
        self.master = newest_master(store, manifest, fragment, numel, at_most)
        self.previous = previous_sha(store, manifest_sha, fragment, self.version)
        self.taken = self._recently_taken(self.version)

    def _recently_taken(self, version: int) -> set[str]:
        """Payloads that a round from `version` on could name again: those of the last `max_stale_rounds` commits."""
        taken: set[str] = set()
        for before in range(max(0, version - self._manifest.terms.max_stale_rounds), version):
            key = keys.commit(self.fragment, before)
            try:
                taken.update(entry.payload for entry in Commit.from_bytes(self._store.get(key), key).taken)
            except CorruptObject:
                continue  # a void round took nothing
        return taken

    @property
    def version(self) -> int:
        """The version of `master`, which is also the number of the open round."""
        return self.master.version

    def advance(self) -> Round | None:
        """Apply the commit of the open round and return the round; None while it is open.

        Raises StoreError when something the commit names can't be read (try again: a round is never skipped), and
        MasterMismatch when the commit stands on another master than ours even after a rebuild from the log.
        """
        terms = self._manifest.terms
        if self.version >= terms.final_version:
            return None
        key = keys.commit(self.fragment, self.version)
        try:
            data = self._store.get(key)
        except KeyMissing:
            return None
        fault, commit = self._judge(key, data)
        if commit is not None and fault is None and commit.base_sha != self.master.sha256:
            self._heal(commit)
        closed = Round(
            self.fragment,
            self.version,
            commit.taken if commit is not None and fault is None else (),
            {entry.site: entry.why for entry in commit.refused} if commit is not None else {},
            fault,
        )
        if fault is not None:
            logger.error("commit_void fragment=%d version=%d fault=%s", self.fragment, self.version, fault)
        self.master = self._merge(closed)
        self.previous = sha256_hex(data)
        self.taken.update(entry.payload for entry in closed.taken)
        self.payloads.forget()
        return closed

    def _judge(self, key: str, data: bytes) -> tuple[str | None, Commit | None]:
        try:
            commit = Commit.from_bytes(data, key)
        except CorruptObject as error:
            return str(error), None
        offers = {entry.site: self._offer(entry.site) for entry in commit.taken}
        fault = commit_fault(
            commit,
            fragment=self.fragment,
            version=self.version,
            previous=self.previous,
            offers={site: offer for site, offer in offers.items() if offer is not None},
            taken=self.taken,
            terms=self._manifest.terms,
        )
        return fault, commit

    def _offer(self, site: str) -> Offer | None:
        key = keys.offer(self.fragment, self.version, site)
        try:
            return Offer.from_bytes(self._store.get(key), key)
        except (KeyMissing, CorruptObject):
            return None

    def _merge(self, closed: Round) -> Master:
        """The next master: the outer step on the weighted mean of what was taken; the same one after a void round."""
        master, terms = self.master, self._manifest.terms
        if not closed.taken:
            return Master(self.fragment, master.version + 1, master.weights, master.momentum, master.sha256)
        parts = [(entry.multiplier, self._payload_of(entry)) for entry in closed.taken]
        weights, momentum = master.weights.clone(), master.momentum.clone()
        nesterov_step(weights, weighted_mean(parts), momentum, lr=terms.lr, mu=terms.momentum)
        return Master.of(self.fragment, master.version + 1, weights, momentum)

    def _payload_of(self, entry: Taken) -> Tensor:
        try:
            return self.payloads.fetch(entry.payload, entry.sha256)
        except CorruptObject as error:
            raise StoreError(f"{error}; a commit took it, so the round can't be skipped: reading it again") from error

    def _heal(self, commit: Commit) -> None:
        """Rule 1: the log says our master is another one. Rebuild it once from the log; stop if it still differs."""
        ours, at_most = self.master, self.version
        logger.error("master_differs fragment=%d version=%d ours=%s", self.fragment, self.version, ours.sha256[:16])
        rebuilt = rebuild_master(self._store, self._manifest, self._manifest_sha, self.fragment, self.numel, at_most)
        if rebuilt.sha256 != commit.base_sha:
            raise MasterMismatch(
                f"fragment {self.fragment} version {self.version}: our master is {ours.sha256[:16]}, rebuilt from the "
                f"log {rebuilt.sha256[:16]}, the commit of {commit.committer} stands on {commit.base_sha[:16]}: this "
                "machine or that one computes differently; run the test vector on both and take the odd one out"
            )
        self.master = rebuilt


class _Rebuilt(Replica):
    """A replica that is only ever moved up to one version, and never heals itself."""

    def _heal(self, commit: Commit) -> None:
        """A rebuild compares at its end, not on the way."""


def rebuild_master(
    store: Store, manifest: Manifest, manifest_sha: str, fragment: int, numel: int, version: int
) -> Master:
    """master(fragment, version) from the newest vouched snapshot at or below it, and the log.

    Raises StoreError when a commit up to `version` is missing.
    """
    replica = _Rebuilt(store, manifest, manifest_sha, fragment, numel, at_most=version)
    while replica.version < version:
        if replica.advance() is None:
            raise StoreError(
                f"{store.uri} has no commit of round {replica.version} of fragment {fragment}, "
                f"which master version {version} is made of"
            )
    return replica.master
