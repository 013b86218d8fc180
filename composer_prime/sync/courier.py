"""A site's errands in the bucket: follows the log, brings the site's offers, closes rounds when it may.

`tick` makes one pass and waits only for the bucket, so that a thread drives it in a site and virtual time in the
simulation; decisions are `protocol`'s, arithmetic is `Replica`'s. All of it runs off the training thread (rule 8).
"""

import logging
from collections.abc import Sequence
from functools import partial

from composer_prime.errors import KeyMissing, RoundWaits, RunGone, RunReplaced, StoreError, StoreUnusable
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.archive import Archive
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.errands import Capture, Errand, Outcome, Settled
from composer_prime.sync.journal import Journal
from composer_prime.sync.members import Members, Pulse
from composer_prime.sync.protocol import due_fragment, reducer_rank, run_is_over, takeover_s
from composer_prime.sync.reading import read_bytes
from composer_prime.sync.records import Offer
from composer_prime.sync.replica import Replica, Round
from composer_prime.sync.roster import Roster
from composer_prime.sync.rounds import RoundCloser
from composer_prime.sync.run import Run
from composer_prime.sync.runtime import Runtime, side_by_side
from composer_prime.sync.snapshots import Master
from composer_prime.sync.tape import Tape
from composer_prime.sync.uploads import Uploads

logger = logging.getLogger(__name__)

FINISH_S = 30.0
"""How long leaving waits for a transfer that is under way."""
LOOK_BUSY, LOOK_IDLE = 1 / 5, 1 / 2
"""Looks at the members, as shares of the liveness time: as often as they beat with an offer out, where it is they who
are waited for, and else less often. Every look reads every beat: most of what many sites ask of a store."""
LOOK_AROUND_S = 2.0
"""Seconds between two looks at a round in which this site has nothing out."""


class Courier:
    """Owns this site's replicas and errands. `tick` is called by one thread; the rest may be called by another."""

    def __init__(
        self,
        store: Store,
        run: Run,
        *,
        runtime: Runtime,
        roster: Roster,
        members: Members,
        pulse: Pulse,
        replicas: list[Replica],
        tape: Tape,
        journal: Journal | None,
        site: str,
        incarnation: int,
    ) -> None:
        self._store = store
        self._run = run
        self._terms = run.terms
        self._runtime = runtime
        self._roster = roster
        self._members = members
        self._pulse = pulse
        self._replicas = replicas
        self._tape = tape
        self._site = site
        self._incarnation = incarnation
        self._closer = RoundCloser(
            store, run, runtime=runtime, roster=roster, members=members, site=site, incarnation=incarnation
        )
        self._pass_lock = runtime.lock()
        """Held for one pass over the bucket; replicas move only under it."""
        self.changed = runtime.condition()
        """Guards masters and errands, which move together; notified when a round has settled."""
        self._masters = [replica.master for replica in replicas]
        self._errands: dict[int, Errand] = {}
        self.uploads = Uploads(
            *(store, run.terms),
            runtime=runtime,
            replicas=replicas,
            journal=journal,
            changed=self.changed,
            site=site,
        )
        self._overtaken: set[int] = set()
        self._archive = Archive(
            store, run, runtime=runtime, roster=roster, members=members, replicas=replicas, tape=tape, site=site
        )
        self._admitted_by = roster.newest
        self._observed_at = float("-inf")
        nonce, manifest = f'"nonce":"{run.manifest.nonce}"'.encode(), run.manifest.to_bytes()
        self._named = manifest.index(nonce), nonce
        """Where in the manifest stands what makes it this run's."""
        self._run_missed = False
        """Whether the last look didn't find the run's manifest."""
        self._looked_at = [float("-inf")] * len(replicas)
        self._turn_is_near = False
        self.returning = False
        """Whether this site has come back and had no turn since: until then it looks whether the others have theirs."""
        self._under_way: tuple[int, int] | None = None
        """When this site last saw a round close, on its own clock."""

    # --- what the training thread asks ------------------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """The open round of each fragment, as far as this site has read the log."""
        with self.changed:
            return tuple(master.version for master in self._masters)

    def pins(self) -> tuple[int, ...]:
        """The oldest version of each fragment that this site may still need: the open round, or a capture before it."""
        with self.changed:
            pinned = [master.version for master in self._masters]
            for fragment, errand in self._errands.items():
                pinned[fragment] = min(pinned[fragment], errand.version)
            return tuple(pinned)

    def master(self, fragment: int) -> Master:
        """The newest master of a fragment that this site knows."""
        with self.changed:
            return self._masters[fragment]

    def replica(self, fragment: int) -> Replica:
        """One fragment's replica, for use before passes are made."""
        return self._replicas[fragment]

    def collect(self, fragment: int) -> tuple[Master, Settled | None]:
        """The newest master known, and what became of the capture of this fragment as of that master.

        A settled outcome is handed out once and forgotten; None means that no capture is known.
        """
        with self.changed:
            errand = self._errands.get(fragment)
            if fragment in self._overtaken:
                self._overtaken.discard(fragment)
                logger.warning("overtaken fragment=%d version=%d", fragment, self._masters[fragment].version)
                self._errands.pop(fragment, None)
                return self._masters[fragment], Settled("overtaken")
            if errand is None:
                return self._masters[fragment], None
            if errand.outcome != "out":
                del self._errands[fragment]
            return self._masters[fragment], Settled(errand.outcome, errand.residual)

    def submit(self, capture: Capture) -> int:
        """Take a capture over and return the round it is meant for. One capture of a fragment may be out at a time."""
        with self.changed:
            assert capture.fragment not in self._errands
            errand = Errand(capture, self._masters[capture.fragment].version, ready=capture.local is None)
            self._errands[capture.fragment] = errand
        if capture.local is not None:
            self.uploads.start(errand)
        return errand.version

    def reinstate(self, errand: Errand) -> None:
        """Rule 12: an own offer of an earlier incarnation is still out in the open round; follow it to its end."""
        with self.changed:
            self._errands[errand.capture.fragment] = errand

    def is_over(self) -> bool:
        """Whether every fragment has reached the run's final version."""
        return run_is_over(self.versions(), self._terms)

    def look_ahead(self) -> None:
        """Find out in the next pass which round is open, since the training thread is about to take a turn."""
        self._turn_is_near = True

    def is_due_elsewhere(self) -> bool:
        """Whether another site was seen to have offered into the round that is due; looked for while `returning`."""
        return self._under_way is not None and self._under_way == self._due_round()

    def finish(self) -> None:
        """Wait for uploads and snapshots that are under way; passes are no longer made."""
        tasks = [errand.upload for errand in self._errands.values()] + [self._archive.task]
        for task in tasks:
            if task is not None and task.is_alive():
                task.join(timeout=FINISH_S)

    @property
    def closed(self) -> bool:
        """Whether the close record is known to stand."""
        return self._archive.closed

    @property
    def has_errands(self) -> bool:
        """Whether a capture is on its way, so that passes are worth making often."""
        return any(errand.outcome == "out" for errand in list(self._errands.values()))

    @property
    def is_uploading(self) -> bool:
        """Whether captures are on their way and all are still being coded or uploaded: no offer of them stands."""
        out = [errand for errand in list(self._errands.values()) if errand.outcome == "out"]
        return bool(out) and not any(errand.ready for errand in out)

    @property
    def is_gathering(self) -> bool:
        """Whether a round that this site is in is coming together just now."""
        return self._closer.is_gathering

    # --- one pass ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """One pass: follow the log, bring offers, close rounds. Raises StoreError when the bucket can't be used now."""
        with self._pass_lock:
            now = self._runtime.now()
            self._look_at_log(now)
            if now - self._observed_at >= self._terms.liveness_s * (LOOK_BUSY if self.has_errands else LOOK_IDLE):
                self._look_at_members(now)
            if self.returning:
                self._look_for_others()
            failed = [error for error in map(self._bring, list(self._errands)) if error is not None]
            for fragment in self._served():
                if self._closer.serve(self._replicas[fragment]):
                    self._archive.note_commit(fragment)
                    self.follow([fragment])
            self._reduce_parts()
            self._archive.tick()
            if failed:  # an upload: it holds up nobody else's rounds
                raise failed[0]

    def _look_at_log(self, now: float) -> None:
        """Follow the fragments that may have moved, and where a turn is near the one that is due by then."""
        around = [index for index, at in enumerate(self._looked_at) if now - at >= LOOK_AROUND_S]
        looked = {*self._busy(), *around}
        self.follow(sorted(looked))
        if self._turn_is_near:
            self._turn_is_near = False
            while (due := due_fragment(self.versions())) not in looked:
                looked.add(due)
                self.follow([due])

    def catch_up(self) -> None:
        """Read the log up to now, on entering. What it says of this site's name is for `Returning` to judge.

        Fragments side by side: while one waits for the bucket, another computes. A round of which something is missing
        or damaged is passed by a newer snapshot; where there is none it is the present, and waits for what it lacks.
        """
        side_by_side(self._runtime, "outer-catch-up", [partial(self._read_on, replica) for replica in self._replicas])
        if not any(replica.closing is not None for replica in self._replicas):
            self.follow()
        for replica in self._replicas:
            replica.entered_at = replica.version
        with self.changed:
            self._overtaken.clear()

    def _read_on(self, replica: Replica) -> None:
        while True:
            try:
                while self._advance(replica):
                    pass
                return
            except (KeyMissing, RoundWaits) as error:
                if replica.closing is None:
                    raise
                logger.warning("round_waits fragment=%d version=%d error=%s", replica.fragment, replica.version, error)
                if not (rounds := replica.install_snapshot()):
                    return
                self._settle_all(replica, rounds)

    def follow(self, fragments: list[int] | None = None) -> None:
        """Apply every commit there is, to these or all fragments, and settle the captures they decide."""
        with self._pass_lock:
            replicas = [
                self._replicas[index] for index in (range(len(self._replicas)) if fragments is None else fragments)
            ]
            for replica in replicas:
                self._looked_at[replica.fragment] = self._runtime.now()
            while replicas:
                looked = self._runtime.map(lambda replica: replica.look() is not None, replicas)
                ready = [found or replica.closing is not None for replica, found in zip(replicas, looked, strict=True)]
                replicas = [replica for replica, is_ready in zip(replicas, ready, strict=True) if is_ready]
                replicas = [replica for replica in replicas if self._advance(replica)]

    def _due_round(self) -> tuple[int, int]:
        versions = self.versions()
        due = due_fragment(versions)
        return due, versions[due]

    def _look_for_others(self) -> None:
        """See whether somebody else has offered into the round that is due."""
        due = self._due_round()
        if self._under_way != due:
            offered = (key for key in self._store.list(keys.offers_prefix(*due)) if keys.is_offer(key))
            if any(keys.offer_site(key) != self._site for key in offered):
                logger.info("round_under_way fragment=%d version=%d", *due)
                self._under_way = due

    def _busy(self) -> list[int]:
        """Fragments that may move any moment: a capture is out, or a commit waits for its parts."""
        closing = [replica.fragment for replica in self._replicas if replica.closing is not None]
        out = [fragment for fragment, errand in list(self._errands.items()) if errand.outcome == "out"]
        return sorted({*out, *closing})

    def _advance(self, replica: Replica) -> bool:
        rounds = replica.advance()
        if rounds:
            self._settle_all(replica, rounds)
        return bool(rounds)

    def _settle_all(self, replica: Replica, rounds: Sequence[Round]) -> None:
        """The replica has passed these rounds."""
        with self.changed:
            self._masters[replica.fragment] = replica.master
            for closed in rounds:
                self._settle(closed)
            self.changed.notify_all()
        _ = replica.master.sha256  # hashed here and now, while the training thread already goes on

    def _settle(self, closed: Round) -> None:
        """Decide what a closed round means for this site's capture of that fragment."""
        errand = self._errands.get(closed.fragment)
        took_part = errand is not None and errand.offered_at == closed.version
        self._closer.note_closed(closed, took_part)
        self._tape.write(
            "round",
            fragment=closed.fragment,
            version=closed.version,
            taken=[entry.site for entry in closed.taken],
            refused=closed.refused,
            fault=closed.fault,
            parts=closed.num_parts,
        )
        entry = closed.taken_of(self._site)
        if entry is not None and (errand is None or errand.payload != entry.payload):
            self._overtaken.add(closed.fragment)
        if errand is None or errand.outcome != "out":
            return
        if entry is not None:
            self._end(errand, "taken" if errand.payload == entry.payload else "overtaken")
        elif errand.offered_at is not None or errand.ready:
            # Offered and passed over, or a moment too late: fresher work replaces it.
            self._end(errand, "missed" if closed.taken else "void")
        # else: the upload outlasted the round; its payload goes into the next one under a new record (rule 4)

    def _end(self, errand: Errand, outcome: Outcome) -> None:
        errand.outcome = outcome
        self._replicas[errand.capture.fragment].merger.release(errand.payload)

    # --- offers -----------------------------------------------------------------------------------------------------

    # --- offers -----------------------------------------------------------------------------------------------------

    def _bring(self, fragment: int) -> StoreError | StoreUnusable | None:
        """Create the offer's record once its payload is there, in whatever round is open by then.

        Returns what its upload failed of, which is tried again.
        """
        errand = self._errands.get(fragment)
        if errand is None or errand.outcome != "out" or errand.offered_at is not None:
            return None
        if (failure := errand.failure) is not None:
            if not isinstance(failure, StoreError | StoreUnusable):
                raise failure
            self.uploads.start(errand)
            return failure
        replica = self._replicas[fragment]
        if not errand.ready or replica.version >= self._terms.final_version:
            return None  # after the last round there is none to offer into
        offer = self._offer_of(errand, replica.master)
        # The record names the round first and the claims are read then: docs/protocol.md, "Two processes of one name".
        self._pulse.check()
        self._check_run()
        data = self._roster.sign(offer).to_bytes()
        won = self._store.create(keys.offer(fragment, offer.version, self._site), data)
        errand.offered_at = offer.version
        if not won:
            # An earlier incarnation offered in this round: its record stands, and this capture misses the round.
            logger.info("offer_stands_already fragment=%d version=%d", fragment, offer.version)
            return None
        self._tape.write(
            "offer", fragment=fragment, version=offer.version, tokens=errand.capture.tokens, nbytes=errand.nbytes
        )
        return None

    def _offer_of(self, errand: Errand, master: Master) -> Offer:
        capture = errand.capture
        return Offer(
            site=self._site,
            incarnation=self._incarnation,
            fragment=capture.fragment,
            version=master.version,
            base_sha=master.sha256,
            tokens=capture.tokens,
            steps=capture.steps,
            trained_tokens=capture.trained_tokens,
            codec=self._terms.codec,
            payload=errand.payload,
            sha256=errand.sha256,
            slices=errand.slices,
            nbytes=errand.nbytes,
            norms=errand.norms,
        )

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _served(self) -> list[int]:
        """Fragments whose open round this site may close: where it has an offer."""
        served = {f for f, errand in list(self._errands.items()) if errand.offered_at == self._replicas[f].version}
        return sorted(f for f in served if self._replicas[f].closing is None)

    def _reduce_parts(self) -> None:
        """Rule 10: merge the parts that are this site's to merge, or that their first choice has left lying."""
        for replica in self._replicas:
            closing = replica.closing
            if closing is None or not closing.commit.num_parts:
                continue
            now = self._runtime.now()
            commit, live = closing.commit, self._members.live(now) | {self._site}
            taken = [entry.site for entry in commit.taken]
            guests = self._roster.guests(commit.admissions)
            for index in closing.missing_parts():
                place = (commit.fragment, commit.version, index)
                rank = reducer_rank(self._site, live, taken, *place, guests)
                if rank is not None and now - closing.seen_at >= rank * takeover_s(self._closer.grace_s):
                    replica.reduce(index)
            self.follow([replica.fragment])

    def _look_at_members(self, now: float) -> None:
        """See who is there, whether the run still is, and whether keys were admitted or revoked."""
        self._check_run()
        self._observed_at = now
        newest = self._roster.refresh()
        if newest != self._admitted_by:  # a commit may have told the roster of it before
            self._roster.check_admitted(self._site)
            self._admitted_by = newest
        self._members.observe()

    def _check_run(self) -> None:
        """Raise RunReplaced where another run's manifest stands, RunGone where none does. A look reads the nonce."""
        (start, nonce), self._run_missed, missed = self._named, False, self._run_missed
        try:
            if not missed and self._store.get_range(keys.manifest(), start, len(nonce)) == nonce:
                return
            if sha256_hex(read_bytes(self._store, keys.manifest())) != self._run.sha256:
                raise RunReplaced(f"{self._store.uri} holds another run now: this site's is gone, and it stops")
        except KeyMissing:
            self._run_missed = True
            raise RunGone(
                f"{self._store.uri} no longer holds the run's manifest: its objects were deleted. This site's "
                "checkpoint is intact: restore the bucket, then start it again with --resume"
            ) from None
