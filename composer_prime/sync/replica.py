"""This site's copy of one fragment's master, moved forward by the log alone (rule 1).

Nothing local enters here: two replicas that have read the same log hold the same bytes, on any machine.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
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
from composer_prime.sync.snapshots import Master, newest_master, vouched_sha, vouched_snapshots
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
        but_for: Collection[int] = (),
    ) -> None:
        """Stand on `start`, or on the newest vouched snapshot, none above version `at_most` nor of the versions
        `but_for`; `advance` moves on.

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
        self.closing: Closing | None = None
        """The open round's commit, once it is there, until its merge is complete."""
        self._looked: bytes | None = None
        self._stranded = False
        """Whether our master is wrong and the log to make it anew is gone; what a live site pins is less than that."""
        self.on_pass: Callable[[], None] = lambda: None
        """Called when a round has been passed, with all that was read for it found sound."""
        master = start or newest_master(store, run, roster, fragment, at_most=at_most, but_for=but_for)
        if master is None:
            raise CorruptObject(
                f"{store.uri} holds no sound snapshot of fragment {fragment} that its log vouches for: "
                "the run can't be joined; restore masters/ from a backup or start a new run"
            )
        self._stand_on(master)

    def _stand_on(self, master: Master) -> None:
        """All at once or, when something can't be read, not at all."""
        place = (self.fragment, master.version, self._run.ends)
        history = History.read(self._store, self._runtime, self._terms, self._roster, *place)
        previous = self._run.sha256
        if master.version > 0:
            previous = sha256_hex(read_bytes(self._store, keys.commit(self.fragment, master.version - 1)))
        history.floor = max(history.floor, self.history.floor)
        history.all_voids |= self.history.all_voids
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
        MasterMismatch when our master is the odd one out even after a rebuild from the log.
        """
        if self.version >= self._terms.final_version:
            return []
        if self.closing is None and not self._stranded:
            data = self.look()
            if data is None:
                return []
            self._looked = None
            found = self._judge(data)
            if isinstance(found, Round):
                return self._pass_void(found, sha256_hex(data))
            self.closing = found
        return self._jump() if self.closing is None else self._merge(self.closing)

    @property
    def is_judge(self) -> bool:
        """Whether it knows enough to call a commit void, or to make one: a coarse master has no hash to compare."""
        return not self.master.coarse

    def look(self) -> bytes | None:
        """The bytes of the open round's commit, kept for `advance`; None while there is none."""
        if self._looked is None and self.closing is None and self.version < self._terms.final_version:
            with contextlib.suppress(KeyMissing):
                self._looked = read_bytes(self._store, keys.commit(self.fragment, self.version))
        return self._looked

    def _judge(self, data: bytes) -> Closing | Round | None:
        """The open round's commit when it is sound, else a void round; None when we are stranded before it."""
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
            authority=self._roster.authority(commit.admissions),
        )
        if self.is_judge and fault is None and commit.base_sha != self.master.sha256:
            fault = self._heal(commit)
        if fault is not None and not self._stranded:
            if self._was_mistaken(fault, is_chained=commit.previous == self.previous):
                return self._judge(data)
            return self._void(fault, commit)
        if self._stranded:
            return None
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
        """A round that took nothing, since its commit is faulty; who is no judge only doubts it."""
        fault = fault[:MAX_REASON]
        if self.is_judge:
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
        following = Master(self.fragment, master.version + 1, *moved, coarse=master.coarse)
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
        self.on_pass()
        return closed

    def _pass_void(self, void: Round, commit_sha: str) -> list[Round]:
        """Who is no judge waits, unless a newer snapshot stands: what it waits for may be gone with the log before."""
        if self.is_judge:
            return [self._pass(void, self.master.unchanged(), commit_sha, None)]
        return self._jump() if any(self._newer_snapshots(self.version)) else []

    def _forget_round(self) -> None:
        self.closing = self._looked = None
        self._stranded = False
        self.merger.forget()

    def become(self, exact: "Replica") -> None:
        """Stand where a replica of the same version stands whose master is whole; ours was coarse.

        Raises ProtocolError when it has read the log otherwise: a coarse replica can't tell whether a commit stands on
        the right master, and what this site was told of its offer may be wrong then.
        """
        if exact.history.taken != self.history.taken:
            raise ProtocolError(
                f"fragment {self.fragment}: with a coarse master, this site took a round before version {self.version} "
                "for sound that the log calls void: start it again, it goes on from its checkpoint"
            )
        self.master, self.history, self.previous = exact.master, exact.history, exact.previous
        self._forget_round()

    # --- when the log differs, or is gone ---------------------------------------------------------------------------

    def _heal(self, commit: Commit) -> str | None:
        """Rule 1: the log names another master than ours. Rebuild; None when that gives the log's, else the fault."""
        ours = self.master.sha256
        logger.error("master_differs fragment=%d version=%d ours=%s", self.fragment, self.version, ours[:16])
        try:
            self._rebuild()
        except (KeyMissing, RoundWaits):  # of a round before: what the others' offers stand on must do
            theirs = self._bases_of_others()
            if ours not in theirs or is_odd_one_out(ours, theirs):
                raise
        if self.master.sha256 == commit.base_sha:
            return None
        return f"stands on master {commit.base_sha[:16]}, the log makes {self.master.sha256[:16]} here"

    def _rebuild(self) -> bool:
        """Make our master anew from a snapshot and the log; whether it was another one, or can't be made any more.

        From a snapshot for which a commit vouches that we took for sound: who makes the commit in question, or made a
        void one, may have stored a master of its own making.

        Raises MasterMismatch when we have read the rounds before otherwise, so that what this site was told of its
        offers is wrong.
        """
        ours = self.master.sha256
        try:
            exact = _rebuilt(
                self._store,
                self._run,
                self.fragment,
                self.version,
                runtime=self._runtime,
                roster=self._roster,
                at_most=max(self.version - 1, 0),
                but_for=self.history.all_voids - {0},  # for the first one the manifest vouches
            )
        except ProtocolError:
            self._stranded = self._may_be_gone(self.version - 1)
            if not self._stranded:
                raise
            return True
        if exact.history.rounds != self.history.rounds:
            raise MasterMismatch(
                f"fragment {self.fragment} version {self.version}: with a wrong master, this site judged a round "
                "before it otherwise than the log does: start it again, it goes on from its checkpoint"
            )
        self.master = exact.master
        return self.master.sha256 != ours

    def is_mistaken(self, theirs: Sequence[str]) -> bool:
        """Whether our master was wrong, as the base hashes of the others' offers say and the log confirms.

        It isn't any more, then: what was judged by it must be judged anew.
        """
        ours = self.master.sha256
        if not is_odd_one_out(ours, theirs):
            return False
        logger.warning("master_doubted fragment=%d version=%d ours=%s", self.fragment, self.version, ours[:16])
        return self._rebuild()

    def _was_mistaken(self, fault: str, is_chained: bool) -> bool:
        """Before a commit is called void: as `is_mistaken`, but MasterMismatch when the log makes our master again.

        is_chained   whether the commit names the bytes that stand here as the one before
        """
        if not self.is_judge:
            return False
        theirs = self._bases_of_others()
        if self.is_mistaken(theirs):
            return True
        ours = self.master.sha256
        if is_odd_one_out(ours, theirs):
            cause = "this machine computes differently; run the test vector on it and take it out"
            if not is_chained and self.version > 0:
                cause = (
                    "others have read other bytes as the commit before than stand in the bucket now; restore "
                    f"{keys.commit(self.fragment, self.version - 1)} from a backup and start this site again"
                )
            raise MasterMismatch(
                f"fragment {self.fragment} version {self.version}: our master is {ours[:16]}, rebuilt from the log it "
                f"is the same, but the others' offers stand on {', '.join(sorted({sha[:16] for sha in theirs}))} (the "
                f"commit {fault}): {cause}"
            )
        return False

    def _bases_of_others(self) -> list[str]:
        listed = self._store.list(keys.offers_prefix(self.fragment, self.version))
        names = [key for key in listed if keys.is_offer(key)]
        records = self._runtime.map(lambda key: find_record(self._store, Offer, key), names)
        return [
            record.base_sha
            for key, record in zip(names, records, strict=True)
            if record is not None and record.base_sha is not None and keys.offer_site(key) != self._site
            if record.site not in self._roster.authority().guests
            if record.is_at(keys.offer_site(key), self.fragment, self.version)
            if self._roster.fault(record, record.site) is None
        ]

    def _waits_in_vain(self, closing: Closing) -> bool:
        """Whether parts are missing since they were collected. Who may merge them finds that out by trying; the others
        must ask, and replicas that only follow (`site` is empty then)."""
        authority, now = self._roster.authority(closing.commit.admissions), self._runtime.now()
        merges = self._site != "" and authority.allows(self._site)
        if merges or now - closing.asked_at < takeover_s(self._terms.grace_s):
            return False
        closing.asked_at = now
        return self._is_collected()

    def _is_collected(self) -> bool:
        """Whether what the open round is made of may have been deleted (rule 13)."""
        return self._may_be_gone(self.version)

    def _may_be_gone(self, version: int) -> bool:
        """Whether garbage may go up to that round: two snapshots are newer, and the log isn't kept."""
        newer = islice(self._newer_snapshots(version), 2)
        return not self._terms.keep_log and len(list(newer)) == 2

    def _newer_snapshots(self, version: int) -> Iterator[int]:
        found = vouched_snapshots(self._store, self._run, self._roster, self.fragment)
        return takewhile(lambda stored: stored > version, (stored for stored, _ in found))

    def is_passed(self) -> bool:
        """Whether the others have passed the round that is closing here: a commit that follows its own by hash stands,
        right after it or after void ones, of a site that is admitted now or such that one of these follows."""
        assert self.closing is not None
        previous = self.closing.commit_sha
        for version in range(self.version + 1, self._terms.final_version):
            following = find_commit(self._store, self._roster, self.fragment, version)
            follows = following is not None and following.previous == previous
            if follows and vouched_sha(self._store, self._run, self._roster, self.fragment, version) is not None:
                return True
            try:
                previous = sha256_hex(read_bytes(self._store, keys.commit(self.fragment, version)))
            except KeyMissing:
                break
        return False

    def leap(self, why: StoreError) -> list[Round]:
        """Stand on a newer snapshot, on entering, since the others have passed a round that can't be read any more.

        Raises StoreError when there is none yet.
        """
        if not any(self._newer_snapshots(self.version)):
            raise StoreError(
                f"fragment {self.fragment}: the others have passed round {self.version}, of which something is missing "
                f"or damaged now ({why}): restore it, or start this site again when the next snapshot is stored"
            ) from why
        return self._jump()

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


class StrictReplica(Replica):
    """Follows the log from a whole master that the log vouches for, so that what stands on another one is void."""

    def _heal(self, commit: Commit) -> str | None:
        return f"stands on master {commit.base_sha[:16]}, the log makes {self.master.sha256[:16]}"

    def _was_mistaken(self, fault: str, is_chained: bool) -> bool:
        """It doesn't ask the others."""
        return False


class _Rebuilt(StrictReplica):
    """Moved up to one version by the log alone."""

    def _jump(self) -> list[Round]:
        raise ProtocolError(
            f"{self._store.uri} no longer holds what round {self.version} of {self.fragment} is made of"
        )


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
    return _rebuilt(store, run, fragment, version, runtime=runtime, roster=roster, start=start).master


def _rebuilt(
    store: Store,
    run: Run,
    fragment: int,
    version: int,
    *,
    runtime: Runtime,
    roster: Roster,
    start: Master | None = None,
    at_most: int | None = None,
    but_for: Collection[int] = (),
) -> Replica:
    """A replica on it. Of snapshots none is newer than `at_most`, or of the versions `but_for`."""
    chosen = {"start": start, "at_most": version if at_most is None else at_most, "but_for": but_for}
    replica = _Rebuilt(store, run, fragment, runtime=runtime, roster=roster, site="", **chosen)
    while replica.version < version:
        if not replica.advance():
            raise StoreError(
                f"{store.uri} has no complete round {replica.version} of fragment {fragment}, "
                f"which master version {version} is made of"
            )
    return replica
