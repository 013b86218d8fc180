"""A site's errands in the bucket: follows the log, brings the site's offers, closes rounds when it may.

`tick` makes one pass and never waits, so that a thread (or a simulator with virtual time) can drive it; decisions are
`protocol`'s, arithmetic is `Replica`'s. All of it runs off the training thread (rule 8).
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing
from composer_prime.outer.codecs import get_codec
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.members import Members
from composer_prime.sync.protocol import (
    STAGGER_S,
    RoundDecision,
    RoundView,
    Verdict,
    commit_rank,
    decide_round,
    offer_fault,
    run_is_over,
    wants_snapshot,
    write_commit,
)
from composer_prime.sync.records import Close, Manifest, Offer, sha256_hex
from composer_prime.sync.replica import Replica, Round
from composer_prime.sync.snapshots import Master, store_master
from composer_prime.sync.tape import Tape

logger = logging.getLogger(__name__)

Outcome = Literal["out", "taken", "missed"]
"""What became of a capture: still out, merged by a commit, or passed over (its movement is carried)."""


@dataclass(frozen=True)
class Capture:
    """A fragment's movement, handed over by the training thread.

    pseudograd   fp32, 1-D: adopted values minus local values; None when there is nothing to offer
    tokens, steps, trained_tokens   as the offer states them
    """

    fragment: int
    pseudograd: Tensor | None
    tokens: int
    steps: int
    trained_tokens: int


@dataclass
class _Errand:
    """One capture on its way: coded and uploaded, then offered, then settled."""

    capture: Capture
    version: int
    """The round that was open at the capture."""
    payload: str | None = None
    sha256: str | None = None
    nbytes: int = 0
    norm: float = 0.0
    ready: bool = False
    offered_at: int | None = None
    outcome: Outcome = "out"
    upload: Future[None] | None = None


@dataclass
class _OpenRound:
    """What this site has seen of one fragment's open round."""

    version: int
    offers: dict[str, Offer] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    quorum_at: float | None = None
    all_at: float | None = None
    closable_at: float | None = None


class Courier:
    """Owns this site's replicas and errands. `tick` is called by one thread; the rest may be called by another."""

    def __init__(
        self,
        *,
        store: Store,
        manifest: Manifest,
        replicas: list[Replica],
        members: Members,
        tape: Tape,
        site: str,
        incarnation: int,
        uploads: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._terms = manifest.terms
        self._codec = get_codec(manifest.terms.codec)
        self._replicas = replicas
        self._members = members
        self._tape = tape
        self._site = site
        self._incarnation = incarnation
        self._uploads = uploads
        self._clock = clock
        self._pass_lock = threading.RLock()
        """Held for one pass over the bucket; replicas move only under it."""
        self.changed = threading.Condition()
        """Guards masters and errands, which move together; notified when a round has settled."""
        self._masters = [replica.master for replica in replicas]
        self._errands: dict[int, _Errand] = {}
        self._rounds: dict[int, _OpenRound] = {}
        self._observed_at = float("-inf")
        self._observe_every_s = manifest.terms.liveness_s / 10
        self._closed = False
        self.upload_s = 0.0
        """Seconds that coding and uploading took, off the training thread."""

    # --- what the training thread asks ------------------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """The open round of each fragment, as far as this site has read the log."""
        with self.changed:
            return tuple(master.version for master in self._masters)

    def master(self, fragment: int) -> Master:
        """The newest master of a fragment that this site knows."""
        with self.changed:
            return self._masters[fragment]

    def collect(self, fragment: int) -> tuple[Master, Outcome | None]:
        """The newest master known, and what became of the capture of this fragment as of that master.

        A settled outcome is handed out once and forgotten; None means that no capture is known.
        """
        with self.changed:
            errand = self._errands.get(fragment)
            if errand is not None and errand.outcome != "out":
                del self._errands[fragment]
            return self._masters[fragment], errand.outcome if errand is not None else None

    def submit(self, capture: Capture) -> int:
        """Take a capture over and return the round it is meant for. One capture of a fragment may be out at a time."""
        with self.changed:
            assert capture.fragment not in self._errands
            errand = _Errand(capture, self._masters[capture.fragment].version, ready=capture.pseudograd is None)
            self._errands[capture.fragment] = errand
        if capture.pseudograd is not None:
            errand.upload = self._uploads.submit(self._upload, errand)
        return errand.version

    def reinstate(self, offer: Offer) -> None:
        """Rule 12: an own offer of an earlier incarnation is still out in the open round; follow it to its end."""
        capture = Capture(offer.fragment, None, offer.tokens, offer.steps, offer.trained_tokens)
        with self.changed:
            self._errands[offer.fragment] = _Errand(
                capture, offer.version, offer.payload, offer.sha256, offer.nbytes, offer.norm, True, offer.version
            )

    def is_over(self) -> bool:
        """Whether every fragment has reached the run's final version."""
        return run_is_over(self.versions(), self._terms)

    # --- one pass ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """One pass: follow the log, bring offers, close rounds. Raises StoreError when the bucket can't be used now."""
        with self._pass_lock:
            now = self._clock()
            self.follow()
            if now - self._observed_at >= self._observe_every_s:
                self._observe(now)
            for fragment in list(self._errands):
                self._bring(fragment)
                self._serve(fragment, now)
            self._close_run()

    def follow(self) -> None:
        """Apply every commit there is, to every fragment, and settle the captures they decide."""
        with self._pass_lock:
            for replica in self._replicas:
                while (closed := replica.advance()) is not None:
                    with self.changed:
                        self._masters[replica.fragment] = replica.master
                        self._settle(closed)
                        self.changed.notify_all()

    def _settle(self, closed: Round) -> None:
        """Decide what a closed round means for this site's capture of that fragment."""
        self._rounds.pop(closed.fragment, None)
        self._tape.write(
            "round",
            fragment=closed.fragment,
            version=closed.version,
            taken=[entry.site for entry in closed.taken],
            refused=closed.refused,
            fault=closed.fault,
        )
        errand = self._errands.get(closed.fragment)
        if errand is None or errand.outcome != "out":
            return
        if errand.payload is not None and closed.took(self._site, errand.payload):
            errand.outcome = "taken"
        elif errand.offered_at is not None or errand.ready:
            errand.outcome = "missed"  # offered and passed over, or a moment too late: fresher work replaces it
        # else: the upload outlasted the round; its payload goes into the next one under a new record (rule 4)

    def _upload(self, errand: _Errand) -> None:
        """Code and upload one payload; runs in the upload pool, payload before record."""
        started = self._clock()
        capture = errand.capture
        assert capture.pseudograd is not None
        data = self._codec.encode(capture.pseudograd)
        sha = sha256_hex(data)
        payload = keys.payload(capture.fragment, errand.version, self._site, sha)
        norm = float(capture.pseudograd.norm())
        self._store.put(payload, data)
        with self.changed:
            errand.payload, errand.sha256, errand.nbytes, errand.norm = payload, sha, len(data), norm
            errand.ready = True
            self.upload_s += self._clock() - started

    def _bring(self, fragment: int) -> None:
        """Create the offer's record once its payload is there, in whatever round is open by then."""
        errand = self._errands.get(fragment)
        if errand is None or errand.outcome != "out" or errand.offered_at is not None:
            return
        if errand.upload is not None and errand.upload.done():
            failure = errand.upload.exception()
            if failure is not None:
                errand.upload = self._uploads.submit(self._upload, errand)
                raise failure
        if not errand.ready:
            return
        master = self._replicas[fragment].master
        capture = errand.capture
        offer = Offer(
            site=self._site,
            incarnation=self._incarnation,
            fragment=fragment,
            version=master.version,
            base_sha=master.sha256,
            tokens=capture.tokens,
            steps=capture.steps,
            trained_tokens=capture.trained_tokens,
            codec=self._terms.codec,
            payload=errand.payload,
            sha256=errand.sha256,
            nbytes=errand.nbytes,
            norm=errand.norm,
        )
        won = self._store.create(keys.offer(fragment, master.version, self._site), offer.to_bytes())
        errand.offered_at = master.version
        if not won:
            # An earlier incarnation offered in this round: its record stands, and this capture misses the round.
            logger.info("offer_stands_already fragment=%d version=%d", fragment, master.version)
            return
        self._tape.write(
            "offer", fragment=fragment, version=master.version, tokens=capture.tokens, nbytes=errand.nbytes
        )

    # --- closing rounds ---------------------------------------------------------------------------------------------

    def _serve(self, fragment: int, now: float) -> None:
        """Close the open round of a fragment in which this site has an offer, when the rules and its rank allow it."""
        errand, replica = self._errands.get(fragment), self._replicas[fragment]
        if errand is None or errand.offered_at != replica.version:
            return
        current = self._rounds.setdefault(fragment, _OpenRound(replica.version))
        self._read_offers(current, replica)
        decision, live = self._decide(current, now)
        if decision.close and self._observed_at < now:
            self._observe(now)  # a site that joined a moment ago is waited for
            decision, live = self._decide(current, now)
        if not decision.close:
            current.closable_at = None
            return
        if current.closable_at is None:
            current.closable_at = now
        rank = commit_rank(self._site, live & current.verdicts.keys(), fragment, current.version)
        if now - current.closable_at < rank * STAGGER_S:
            return
        self._commit(current, replica, decision.take)
        self.follow()

    def _observe(self, now: float) -> None:
        self._members.observe(now)
        self._observed_at = now

    def _decide(self, current: _OpenRound, now: float) -> tuple[RoundDecision, frozenset[str]]:
        live = self._members.live(now) | {self._site}
        return decide_round(self._view(current, live, now), self._terms), live

    def _read_offers(self, current: _OpenRound, replica: Replica) -> None:
        for key in self._store.list(keys.offers_prefix(replica.fragment, current.version)):
            if keys.is_offer(key) and keys.offer_site(key) not in current.verdicts:
                self._judge(key, current, replica)

    def _judge(self, key: str, current: _OpenRound, replica: Replica) -> None:
        """Check one offer as a committer must: its record, and that its payload is there, whole, and decodes."""
        site = keys.offer_site(key)
        try:
            offer = Offer.from_bytes(self._store.get(key), key)
            fault = offer_fault(
                offer,
                site=site,
                fragment=replica.fragment,
                version=current.version,
                base_sha=replica.master.sha256,
                nbytes=self._codec.nbytes(replica.numel),
                taken=replica.taken,
                terms=self._terms,
            )
            if fault is None and offer.payload is not None:
                replica.payloads.fetch(offer.payload, offer.sha256 or "")
        except (CorruptObject, KeyMissing) as error:
            offer, fault = None, str(error)
        if fault is not None or offer is None:
            current.verdicts[site], current.faults[site] = "invalid", fault or "unreadable"
            logger.warning("offer_refused fragment=%d site=%s why=%s", replica.fragment, site, fault)
            return
        current.offers[site] = offer
        current.verdicts[site] = "valid" if offer.payload is not None else "empty"

    def _view(self, current: _OpenRound, live: frozenset[str], now: float) -> RoundView:
        num_valid = sum(verdict == "valid" for verdict in current.verdicts.values())
        if current.quorum_at is None and num_valid >= self._terms.quorum:
            current.quorum_at = now
        if current.all_at is None and live <= current.verdicts.keys():
            current.all_at = now
        return RoundView(
            current.verdicts,
            live,
            None if current.quorum_at is None else now - current.quorum_at,
            None if current.all_at is None else now - current.all_at,
        )

    def _commit(self, current: _OpenRound, replica: Replica, take: tuple[str, ...]) -> None:
        """Create the commit; losing the race is as good. The winner stores the snapshot that is due."""
        record = write_commit(
            fragment=replica.fragment,
            version=current.version,
            base_sha=replica.master.sha256,
            previous=replica.previous,
            offers=current.offers,
            take=take,
            refused=current.faults,
            terms=self._terms,
            committer=self._site,
            incarnation=self._incarnation,
        )
        won = self._store.create(keys.commit(replica.fragment, current.version), record.to_bytes())
        if won and wants_snapshot(current.version + 1, self._terms):
            self.follow()
            store_master(self._store, replica.master)

    def _close_run(self) -> None:
        """Rule 11: once every fragment is final, make sure that the final masters and close.json stand."""
        if self._closed or not self.is_over():
            return
        masters = [replica.master for replica in self._replicas]
        for master in masters:
            if keys.master(master.fragment, master.version, master.sha256) not in self._store.list(
                keys.masters_prefix(master.fragment)
            ):
                store_master(self._store, master)
        record = Close(
            versions=tuple(master.version for master in masters),
            masters=tuple(master.sha256 for master in masters),
            closed_by=self._site,
        )
        if self._store.create(keys.close(), record.to_bytes()):
            self._tape.write("close", versions=record.versions, masters=record.masters)
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether close.json is known to stand."""
        return self._closed

    @property
    def has_errands(self) -> bool:
        """Whether a capture is on its way, so that passes are worth making often."""
        return bool(self._errands)
