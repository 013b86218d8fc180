"""This site's copy of one fragment's master, moved forward by the log alone (rule 1).

Nothing local enters here: two replicas that have read the same log hold the same bytes, on any machine.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from composer_prime.errors import (
    CorruptObject,
    KeyMissing,
    MasterMismatch,
    PayloadUnsound,
    ProtocolError,
    RoundWaits,
    StoreError,
)
from composer_prime.outer.outer_optimizer import nesterov_next
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.history import History, find_commit, voids_among
from composer_prime.sync.merging import Closing, Merger
from composer_prime.sync.protocol import is_odd_one_out, takeover_s
from composer_prime.sync.reading import find_record, read_bytes
from composer_prime.sync.records import MAX_REASON, Commit, Offer, Taken
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.snapshots import Master, newest_master, vouched_snapshots
from composer_prime.sync.validity import commit_fault

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """A round that has closed, as this replica read it. `fault` says why a faulty commit counts as void."""

    fragment: int
    version: int
    taken: tuple[Taken, ...]
    refused: dict[str, str]
    fault: str | None
    num_parts: int = 0

    def taken_of(self, site: str) -> Taken | None:
        """What the round merged of that site."""
        return next((entry for entry in self.taken if entry.site == site), None)


class Replica:
    """One fragment's master and the log behind it. Not thread-safe: one owner moves it; others may read `master`."""

    def __init__(
        self,
        store: Store,
        run: Run,
        fragment: int,
        *,
        runtime: Runtime,
        roster: Roster,
        site: str,
        start: Master | None = None,
        at_most: int | None = None,
    ) -> None:
        """Stand on `start`, or on the newest vouched snapshot, none above version `at_most`; `advance` moves on.

        site   whose replica it is; "" for one that only follows the log

        Raises CorruptObject when the bucket holds no sound snapshot.
        """
        self._store = store
        self._run = run
        self._terms = run.terms
        self._runtime = runtime
        self._roster = roster
        self._site = site
        self.fragment = fragment
        self.coding = run.codings[fragment]
        self.history = History.empty(run.terms)
        self.merger = Merger(store, runtime, roster, self.coding, run.terms, site)
        self.entered_at = -1
        """The version that the log led to when this process entered."""
        self.closing: Closing | None = None
        """The open round's commit, once it is there, until its merge is complete."""
        self._looked: bytes | None = None
        master = start or newest_master(store, run, roster, fragment, at_most=at_most)
        if master is None:
            raise CorruptObject(
                f"{store.uri} holds no sound snapshot of fragment {fragment} that its log vouches for: "
                "the run can't be joined; restore masters/ from a backup or start a new run"
            )
        self._stand_on(master)

    def _stand_on(self, master: Master) -> None:
        """All at once or, when something can't be read, not at all."""
        place = (self.fragment, master.version)
        history = History.read(self._store, self._runtime, self._terms, self._roster, *place)
        previous = self._run.sha256
        if master.version > 0:
            previous = sha256_hex(read_bytes(self._store, keys.commit(self.fragment, master.version - 1)))
        history.floor = max(history.floor, self.history.floor)
        self.master, self.history, self.previous = master, history, previous

    @property
    def version(self) -> int:
        """The version of `master`, which is also the number of the open round."""
        return self.master.version

    @property
    def numel(self) -> int:
        """Parameters of the fragment."""
        return self.coding.fragment.numel

    # --- moving forward ---------------------------------------------------------------------------------------------

    def advance(self) -> list[Round]:
        """Move on by one round, if its commit and all that it needs is there; the rounds passed, none if not.

        More than one where the log no longer holds what a round was made of: then by a newer snapshot.
        Raises StoreError when something the commit names can't be read (try again: a round is never skipped), and
        MasterMismatch when our master is the odd one out.
        """
        if self.version >= self._terms.final_version:
            return []
        if self.closing is None:
            data = self.look()
            if data is None:
                return []
            self._looked = None
            found = self._judge(data)
            if isinstance(found, Round):
                return self._pass_void(found, sha256_hex(data))
            self.closing = found
        return self._merge(self.closing)

    def look(self) -> bytes | None:
        """The bytes of the open round's commit, kept for `advance`; None while there is none."""
        if self._looked is None and self.closing is None and self.version < self._terms.final_version:
            with contextlib.suppress(KeyMissing):
                self._looked = read_bytes(self._store, keys.commit(self.fragment, self.version))
        return self._looked

    def _judge(self, data: bytes) -> Closing | Round:
        """The open round's commit when it is sound, else a void round."""
        key = keys.commit(self.fragment, self.version)
        try:
            commit = Commit.from_bytes(data, key)
        except CorruptObject as error:
            return self._void(str(error), None)
        fault = self._signature_fault(commit) or commit_fault(
            commit,
            facts=self.coding.facts,
            version=self.version,
            previous=self.previous,
            taken=self.history.taken,
            voids=self.history.voids,
            terms=self._terms,
            guests=self._roster.guests(commit.admissions),
        )
        if fault is None and commit.base_sha != self.master.sha256:
            fault = f"stands on master {commit.base_sha[:16]}, the log makes {self.master.sha256[:16]} here"
        if fault is not None:
            if self._site:
                self.check_agrees(self._bases_of_others())
            return self._void(fault, commit)
        now = self._runtime.now()
        return Closing(commit, sha256_hex(data), seen_at=now, asked_at=now)

    def _signature_fault(self, commit: Commit) -> str | None:
        if (fault := self._roster.author_fault(commit)) is not None:
            return fault
        if commit.admissions < self.history.floor:
            return f"honours admission {commit.admissions}, an earlier commit {self.history.floor}"
        self.history.honour(commit)
        for entry in commit.taken:
            fault = self._roster.fault(entry.offer, entry.site, commit.admissions)
            if fault is not None:
                return f"takes an offer of {entry.site} that {fault}"
        return None

    def _void(self, fault: str, commit: Commit | None) -> Round:
        """A round that took nothing, since its commit is faulty."""
        fault = fault[:MAX_REASON]
        logger.error("commit_void fragment=%d version=%d fault=%s", self.fragment, self.version, fault)
        refused = {} if commit is None else {entry.site: entry.why for entry in commit.refused}
        return Round(self.fragment, self.version, (), refused, fault)

    def _merge(self, closing: Closing) -> list[Round]:
        """The outer step on what the commit takes, once all of it is there."""
        commit, master, terms = closing.commit, self.master, self._terms
        refused = {entry.site: entry.why for entry in commit.refused}
        closed = Round(self.fragment, self.version, commit.taken, refused, None, commit.num_parts)
        if not commit.taken:
            return [self._pass(closed, master.unchanged(), closing.commit_sha, commit)]
        if closing.unsound is not None:
            return self._pass_void(self._void(closing.unsound, commit), closing.commit_sha)
        try:
            mean = self.merger.pseudograd(closing)
        except PayloadUnsound as error:
            closing.unsound = str(error)
            return self._pass_void(self._void(closing.unsound, commit), closing.commit_sha)
        except (KeyMissing, RoundWaits):
            if self._is_collected():
                return self._jump()
            raise
        if mean is None:
            return self._jump() if closing.gone or self._waits_in_vain(closing) else []
        moved = nesterov_next(master.weights, mean, master.momentum, lr=terms.lr, mu=terms.momentum)
        if moved is None:
            return self._pass_void(self._void("its merge isn't finite", commit), closing.commit_sha)
        following = Master(self.fragment, master.version + 1, *moved)
        return [self._pass(closed, following, closing.commit_sha, commit)]

    def reduce(self, index: int) -> None:
        """Merge one part of the round that is closing, for everybody."""
        assert self.closing is not None
        self.merger.reduce(self.closing, index, self._is_collected)

    def _pass(self, closed: Round, master: Master, commit_sha: str, commit: Commit | None) -> Round:
        """The open round has closed, and `master` is the next one; `commit` is None when it was void."""
        self.previous = commit_sha
        self.history.add(self.version, commit)
        self.master = master
        self._forget_round()
        return closed

    def _pass_void(self, void: Round, commit_sha: str) -> list[Round]:
        return [self._pass(void, self.master.unchanged(), commit_sha, None)]

    def _forget_round(self) -> None:
        self.closing = self._looked = None
        self.merger.forget()

    # --- when the log differs, or is gone ---------------------------------------------------------------------------

    def check_agrees(self, theirs: Sequence[str]) -> None:
        """Rule 1: raise MasterMismatch where our master is the odd one out. Who only follows the log asks nobody.

        theirs   the base hashes that the other sites' offers of the open round name
        """
        ours = self.master.sha256
        own_voice = [ours] if self.version == self.entered_at else []  # made anew: one other's word isn't enough
        if is_odd_one_out(ours, [*theirs, *own_voice]):
            others = ", ".join(sorted({sha[:16] for sha in theirs}))
            raise MasterMismatch(
                f"fragment {self.fragment} version {self.version}: our master is {ours[:16]}, the others' offers stand "
                f"on {others}. This site stops: started again, it rebuilds its masters from snapshot and log. If it "
                "stops here again, this machine computes differently, or the log was changed (`composer-prime verify`)"
            )

    def _bases_of_others(self) -> list[str]:
        listed = self._store.list(keys.offers_prefix(self.fragment, self.version))
        names = [key for key in listed if keys.is_offer(key)]
        records = self._runtime.map(lambda key: find_record(self._store, Offer, key), names)
        return [
            record.base_sha
            for key, record in zip(names, records, strict=True)
            if record is not None and keys.offer_site(key) != self._site
            if record.site not in self._roster.guests()
            if record.is_at(keys.offer_site(key), self.fragment, self.version)
            if self._roster.fault(record, record.site) is None
        ]

    def _waits_in_vain(self, closing: Closing) -> bool:
        """Whether parts are missing since they were collected. Who may merge them finds that out by trying; the others
        must ask, and replicas that only follow (`site` is empty then)."""
        guests, now = self._roster.guests(closing.commit.admissions), self._runtime.now()
        merges = self._site != "" and self._site not in guests
        if merges or now - closing.asked_at < takeover_s(self._terms.grace_s):
            return False
        closing.asked_at = now
        return self._is_collected()

    def _is_collected(self) -> bool:
        """Whether what the open round is made of may have been deleted (rule 13): two snapshots are newer, and the log
        isn't kept."""
        newer = islice(self._newer_snapshots(self.version), 2)
        return not self._terms.keep_log and len(list(newer)) == 2

    def _newer_snapshots(self, version: int) -> Iterator[int]:
        found = vouched_snapshots(self._store, self._run, self._roster, self.fragment)
        return takewhile(lambda stored: stored > version, (stored for stored, _ in found))

    def install_snapshot(self) -> list[Round]:
        """On entering: stand on a newer snapshot, if there is one, since a round before it can't be read."""
        return self._jump() if any(self._newer_snapshots(self.version)) else []

    def _jump(self) -> list[Round]:
        """Stand on a newer snapshot, since the log before it is gone; the rounds in between, as their commits tell."""
        master = newest_master(self._store, self._run, self._roster, self.fragment, above=self.version)
        if master is None:
            raise StoreError(f"{self._store.uri} lost what round {self.version} of fragment {self.fragment} is made of")
        versions = range(self.version, master.version)
        commits = self._runtime.map(
            lambda version: find_commit(self._store, self._roster, self.fragment, version), versions
        )
        self._stand_on(master)
        self._forget_round()
        voids = voids_among(versions, commits, self.history.voids)
        logger.warning("jumped fragment=%d from=%d to=%d", self.fragment, versions.start, master.version)
        return [
            Round(self.fragment, version, () if commit is None or version in voids else commit.taken, {}, None)
            for version, commit in zip(versions, commits, strict=True)
        ]


def rebuild_master(
    store: Store,
    run: Run,
    fragment: int,
    version: int,
    *,
    runtime: Runtime,
    roster: Roster,
    start: Master | None = None,
) -> Master:
    """master(fragment, version) from `start`, or the newest vouched snapshot at or below it, and the log.

    Raises StoreError when a commit up to `version` is missing, ProtocolError when the log before it is gone.
    """
    places = {"runtime": runtime, "roster": roster, "site": ""}
    replica = Replica(store, run, fragment, **places, start=start, at_most=version)
    while replica.version < version:
        at = replica.version
        if not replica.advance():
            raise StoreError(
                f"{store.uri} has no complete round {at} of fragment {fragment}, which master version {version} is "
                "made of"
            )
        if replica.version > version:
            raise ProtocolError(f"{store.uri} no longer holds what round {at} of fragment {fragment} is made of")
    return replica.master
