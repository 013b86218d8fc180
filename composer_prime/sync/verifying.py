"""Rule 17: rebuilds every master from the oldest kept snapshot and the log, bit for bit, and names what differs.

The replay is the sites' own `Replica`, so what is verified is what they compute. Beside it, everything that a site
takes on trust is compared: snapshots, close records, and the parts that reducers merged. Nothing is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing, PayloadUnsound, ProtocolError
from composer_prime.outer.fragments import model_fingerprint
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.lifetime import close_fault, find_manifest
from composer_prime.sync.merging import Closing, Merger
from composer_prime.sync.reading import find_record, read_bytes, read_record
from composer_prime.sync.records import Close, Commit, Offer, Part
from composer_prime.sync.replica import Replica, Round
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import FragmentCoding, Run, load_run
from composer_prime.sync.runtime import Runtime, ThreadRuntime
from composer_prime.sync.snapshots import Master, load_master, newest_master, read_master, vouched_sha
from composer_prime.sync.start import check_arithmetic
from composer_prime.sync.terms import Terms

NOBODY = ""
"""Stands for the verifier where a site's name is due; no site can have it."""


@dataclass(frozen=True)
class FragmentReport:
    """What was found sound of one fragment.

    first, last     versions from which and to which its master was rebuilt
    num_rounds      rounds replayed on the way; `num_void` of them merged nothing
    num_parts       merged parts that were computed again from the payloads
    num_snapshots   stored snapshots compared
    num_skipped     rounds whose payloads and offers were deleted as no longer needed: a snapshot stands for them
    """

    fragment: int
    first: int
    last: int
    num_rounds: int
    num_void: int
    num_parts: int
    num_snapshots: int
    num_skipped: int = 0

    def __str__(self) -> str:
        skipped = f", {self.num_skipped} no longer kept" if self.num_skipped else ""
        return (
            f"fragment {self.fragment}: version {self.first} to {self.last}, {self.num_rounds} rounds{skipped}, "
            f"{self.num_void} void, {self.num_parts} parts recomputed, {self.num_snapshots} snapshots compared"
        )


def _fault(fragment: int, version: int, key: str, what: str, who: str | None = None) -> CorruptObject:
    """The error that names one differing object; `who` wrote it, as far as it says so itself."""
    by = f" of {who}" if who else ""
    return CorruptObject(f"fragment {fragment} version {version}: {key}{by} {what}")


class Verifier:
    """One run under examination. `check` goes through one fragment; no more than one is held in memory."""

    def __init__(self, store: Store) -> None:
        """Raises BadInput when no run is there, ProtocolError when it can't be read, when this machine's arithmetic
        isn't the run's, or when its manifest or a close record is unsound.
        """
        find_manifest(store)
        self._store = _Unwritten(store)
        self.run = load_run(self._store)
        check_arithmetic(self.run.manifest)
        self._check_fingerprint()
        self._runtime = ThreadRuntime()
        self._roster = Roster(self._store, self.run.manifest, self.run.sha256)
        self._roster.refresh()
        self._closes = self._read_closes()

    @property
    def is_closed(self) -> bool:
        """Whether the run has ended, as far as it was prolonged."""
        return self.run.closing in self._closes

    def close(self) -> None:
        """Let go of threads. The store stays open."""
        self._runtime.close()

    def check(self, fragment: int, progress: Callable[[int], object] = lambda version: None) -> FragmentReport:
        """Rebuild one fragment's masters and compare them with all that names one.

        progress   called with each version reached

        Raises CorruptObject with the first fault: fragment, version, object, and who wrote it.
        """
        listed = self._store.list(keys.rounds_prefix(fragment))
        snapshots = self._read_snapshots(fragment)
        replica = self._replica(fragment, self._oldest(fragment, snapshots), sorted(snapshots))
        first, num_rounds, num_void, num_compared = replica.version, 0, 0, 0
        while True:
            num_compared += self._compare(replica, snapshots)
            progress(replica.version)
            previous, num_skipped, data = replica.previous, replica.num_skipped, replica.look()
            try:
                rounds = replica.advance()
            except KeyMissing as error:
                key = keys.commit(fragment, replica.version)
                raise _fault(fragment, replica.version, key, f"can't be merged: {error}") from error
            if not rounds:
                break
            if replica.num_skipped > num_skipped:
                continue
            num_rounds += 1
            num_void += not rounds[0].taken
            if rounds[0].fault is not None:
                self._check_void(replica, rounds[0], previous, data or b"", snapshots)
        self._check_end(replica, listed, snapshots)
        num_parts, num_skipped = replica.checker.num_recomputed, replica.num_skipped
        return FragmentReport(
            fragment, first, replica.version, num_rounds, num_void, num_parts, num_compared, num_skipped
        )

    # --- what the run says of itself --------------------------------------------------------------------------------

    def _check_fingerprint(self) -> None:
        manifest = self.run.manifest
        made = model_fingerprint([(parameter.name, parameter.shape) for parameter in manifest.parameters])
        if made != manifest.fingerprint:
            raise CorruptObject(
                f"{keys.manifest()} of {manifest.created_by} states the fingerprint {manifest.fingerprint[:16]}, "
                f"its parameters make {made[:16]}"
            )

    def _read_closes(self) -> dict[int, Close]:
        """The close records by number. Raises CorruptObject on one that is unsound, or gone though the run went on."""
        found: dict[int, Close] = {}
        for number in range(self.run.closing + 1):
            key = keys.close(number)
            try:
                close = read_record(self._store, Close, key)
            except KeyMissing:
                if number < self.run.closing:
                    raise CorruptObject(f"{key} is gone, though {keys.reopening(number + 1)} stands") from None
                continue
            end = self.run.ends[number]
            if number < self.run.closing:  # what it says of another version, the replay there judges
                end = max(close.versions, default=end)
            if (fault := close_fault(self._roster, close, number, end)) is not None:
                raise CorruptObject(f"{key} of {close.closed_by} {fault}")
            if len(close.versions) != len(self.run.fragments):
                raise CorruptObject(f"{key} of {close.closed_by} isn't a record of {len(self.run.fragments)} fragments")
            found[number] = close
        return found

    # --- one fragment -----------------------------------------------------------------------------------------------

    def _replica(self, fragment: int, start: Master, stored: list[int]) -> "_Checked":
        try:
            return _Checked(
                self._store, self.run, fragment, runtime=self._runtime, roster=self._roster, start=start, stored=stored
            )
        except KeyMissing:
            before = keys.commit(fragment, start.version - 1)
            raise _fault(fragment, start.version - 1, before, "is gone, though a snapshot made by it stands") from None

    def _read_snapshots(self, fragment: int) -> dict[int, dict[str, str]]:
        """sha256 of the master by key, by version, of every stored snapshot; CorruptObject where it isn't the key's."""
        found: dict[int, dict[str, str]] = {}
        for key in self._store.list(keys.masters_prefix(fragment)):
            if not keys.is_master(key):
                continue
            _, version, named = keys.parse_master(key)
            try:
                sha = read_master(self._store, self.run, key).sha256
            except CorruptObject as error:
                raise _fault(fragment, version, key, f"holds no master ({error}): it was changed or cut") from error
            if not sha.startswith(named):
                raise _fault(fragment, version, key, f"holds a master of sha256 {sha}: it was changed or cut")
            found.setdefault(version, {})[key] = sha
        return found

    def _oldest(self, fragment: int, snapshots: Mapping[int, Mapping[str, str]]) -> Master:
        """The oldest stored snapshot that the log vouches for."""
        for version in sorted(snapshots):
            sha = vouched_sha(self._store, self.run, self._roster, fragment, version)
            if sha is None:
                continue
            for key, stored in snapshots[version].items():
                if stored != sha:
                    raise _fault(fragment, version, key, f"is another master than the log names, {sha}")
            return load_master(self._store, self.run, fragment, version, sha)
        raise CorruptObject(f"fragment {fragment}: {self._store.uri} holds no snapshot of it that the log vouches for")

    def _compare(self, replica: Replica, snapshots: Mapping[int, Mapping[str, str]]) -> int:
        """Compare the rebuilt master with all that names one of its version. Returns how many snapshots that were."""
        fragment, master = replica.fragment, replica.master
        stored = snapshots.get(master.version, {})
        for key, sha in stored.items():
            if sha != master.sha256:
                raise _fault(fragment, master.version, key, f"is another master than the log makes, {master.sha256}")
        for number, close in self._closes.items():
            if close.versions[fragment] == master.version and close.masters[fragment] != master.sha256:
                what = f"names the master {close.masters[fragment]}, the log makes {master.sha256}"
                raise _fault(fragment, master.version, keys.close(number), what, close.closed_by)
            if close.versions[fragment] == master.version and close.voids[fragment] != replica.history.voids:
                what = f"says that rounds {close.voids[fragment]} were void, those were {replica.history.voids}"
                raise _fault(fragment, master.version, keys.close(number), what, close.closed_by)
            if close.versions[fragment] == master.version and close.floors[fragment] != replica.history.floor:
                what = f"says that admission {close.floors[fragment]} was honoured, that was {replica.history.floor}"
                raise _fault(fragment, master.version, keys.close(number), what, close.closed_by)
        return len(stored)

    def _check_void(
        self,
        replica: "_Checked",
        closed: Round,
        previous: str,
        data: bytes,
        snapshots: Mapping[int, Mapping[str, str]],
    ) -> None:
        """Raise CorruptObject unless a round that is void here was void for the sites, too.

        previous, data   sha256 of the commit before, as it is stored now, and the bytes of the void one
        """
        fragment, version = closed.fragment, closed.version
        if self._was_void(replica, version, snapshots):
            return
        key, commit = keys.commit(fragment, version), _parsed(data)
        if commit is not None and commit.previous != previous:
            before = keys.commit(fragment, version - 1) if version else keys.manifest()
            what = f"has sha256 {previous}, {key} was made on {commit.previous}: it was changed afterwards"
            raise _fault(fragment, max(version - 1, 0), before, what)
        if replica.void_parts_before and commit is not None and commit.base_sha != replica.master.sha256:
            what = "isn't sound, though the sites merged what stood there: it was changed afterwards"
            raise _fault(fragment, version - 1, replica.void_parts_before[0], what)
        what = f"isn't sound, though the sites took it as such: {closed.fault}"
        raise _fault(fragment, version, key, what, None if commit is None else commit.committer)

    def _was_void(self, replica: Replica, version: int, snapshots: Mapping[int, Mapping[str, str]]) -> bool:
        """Whether the sites counted a commit as void: so says the next one that they took as sound.

        Where none follows, what names the next master tells; where nothing does, nobody has said otherwise.
        """
        fragment = replica.fragment
        for at in range(version + 1, version + self.run.terms.max_stale_rounds + 1):
            commit, after = self._commit(fragment, at), self._commit(fragment, at + 1)
            if after is not None and at in after.voids:
                continue
            if commit is not None:
                return version in commit.voids
            if after is None:
                break
        named = [*snapshots.get(version + 1, {}).values()]
        named += [c.masters[fragment] for c in self._closes.values() if c.versions[fragment] == version + 1]
        return all(sha == replica.master.sha256 for sha in named)

    def _commit(self, fragment: int, version: int) -> Commit | None:
        return find_record(self._store, Commit, keys.commit(fragment, version))

    def _check_end(self, replica: Replica, listed: list[str], snapshots: Mapping[int, Mapping[str, str]]) -> None:
        """Raise CorruptObject when the replay ended before the log does.

        listed   the fragment's keys from before the replay, so that a run which goes on isn't ahead of it
        """
        fragment, version = replica.fragment, replica.version
        later = [key for key in listed if (place := keys.parse_collectable(key)) is not None and place[1] > version]
        later += [key for key in listed if key == keys.commit(fragment, version + 1)]
        later += [key for at, stored in snapshots.items() if at > version for key in stored]
        later += [keys.close(n) for n, close in self._closes.items() if close.versions[fragment] > version]
        if not later:
            return
        stands = f"though {later[0]} stands"
        if version >= self.run.terms.final_version:
            what = f"says that the run ends at version {version}, {stands}: a record of its reopening is gone"
            raise _fault(fragment, version, keys.manifest(), what)
        if replica.closing is None:
            raise _fault(fragment, version, keys.commit(fragment, version), f"is gone, {stands}")
        missing, commit = replica.closing.missing_parts()[0], replica.closing.commit
        raise _fault(fragment, version, keys.merged(fragment, version, missing), f"is gone, {stands}", commit.committer)


class _Checked(Replica):
    """A replica that believes no payload, part or base hash, and jumps only where the log may have been collected."""

    def __init__(
        self,
        store: Store,
        run: Run,
        fragment: int,
        *,
        runtime: Runtime,
        roster: Roster,
        start: Master,
        stored: list[int],
    ) -> None:
        """stored: versions of the fragment's snapshots, in order"""
        super().__init__(store, run, fragment, runtime=runtime, roster=roster, site=NOBODY, start=start)
        self.checker = _CheckingMerger(store, runtime, roster, self.coding, run.terms)
        self.merger = self.checker
        self.num_skipped = 0
        self.void_parts_before: list[str] = []
        """Keys of the parts that counted as zeros in the last round."""
        self._stored = stored

    def _merge(self, closing: Closing) -> list[Round]:
        self.checker.void_parts = []
        self.checker.check(closing)
        rounds = super()._merge(closing)
        if not rounds and not self._terms.keep_log and len(self._later()) > 1:
            return self._jump()  # its parts were collected, the snapshot before it not yet
        self.void_parts_before = self.checker.void_parts
        return rounds

    def _later(self) -> list[int]:
        """Versions of the snapshots ahead; up to the last but one, garbage collection may have been."""
        return [version for version in self._stored if version > self.version]

    def _heal(self, commit: Commit) -> str | None:
        """Nothing is healed: whether the log or the commit is wrong, what the sites made of it tells."""
        return f"names the master {commit.base_sha}, the log makes {self.master.sha256}"

    def _was_mistaken(self, fault: str, is_chained: bool) -> bool:
        """Nor does an auditor ask who agrees with it."""
        return False

    def _jump(self) -> list[Round]:
        """Stand on the next snapshot, where garbage collection may have taken what this round was made of (rule 13)."""
        version, after = self.version, self._later()
        if self._terms.keep_log or len(after) < 2:
            what = "takes offers or payloads that are gone, and no garbage collection may have deleted them"
            raise _fault(self.fragment, version, keys.commit(self.fragment, version), what)
        places = (self._store, self._run, self._roster, self.fragment)
        found = (newest_master(*places, at_most=at_most, above=version) for at_most in after)
        master = next((master for master in found if master is not None), None)
        if master is None:
            key = keys.commit(self.fragment, version)
            raise _fault(self.fragment, version, key, "can't be replayed, and no later snapshot is sound")
        self._stand_on(master)
        self._forget_round()
        self.num_skipped += master.version - version
        return [Round(self.fragment, at, (), {}, None) for at in range(version, master.version)]


class _CheckingMerger(Merger):
    """Merges as sites do, after comparing every payload with its offer and every part with the payloads."""

    def __init__(self, store: Store, runtime: Runtime, roster: Roster, coding: FragmentCoding, terms: Terms) -> None:
        super().__init__(store, runtime, roster, coding, terms, NOBODY)
        self.num_recomputed = 0
        """Parts that were computed again so far."""
        self.void_parts: list[str] = []
        """Keys of this round's parts that count as zeros, since their records are faulty."""

    def check(self, closing: Closing) -> None:
        """Raise CorruptObject on the first offer, payload or part of the round that isn't what its record says."""
        commit = closing.commit
        payloads: list[CorruptObject | None] = []
        if commit.num_parts == 0:
            payloads = self._runtime.map(lambda entry: self._payload_fault(entry.offer), commit.taken)
            if any(isinstance(fault, PayloadUnsound) for fault in payloads):
                return  # a void round, for every site, whatever else is wrong with it
        offers = self._runtime.map(lambda entry: self._offer_fault(entry.offer, commit), commit.taken)
        for fault in [*offers, *payloads]:
            if fault is not None:
                raise fault
        for index in closing.missing_parts():
            part = self._find_part(closing, index)
            if part is None:
                continue
            closing.parts[index] = part
            if part.reducer != NOBODY:
                self._check_merged_payload(part)
                self._recompute(closing, part)

    def _offer_fault(self, offer: Offer, commit: Commit) -> CorruptObject | None:
        """What is wrong when an offer's own record, where it is kept, isn't the one that the commit took. Its site is
        named only where it signed what stands there."""
        key = keys.offer(offer.fragment, offer.version, offer.site)
        try:
            stands = Offer.from_bytes(read_bytes(self._store, key), key)
        except CorruptObject:
            stands = None
        except KeyMissing:
            what = f"is gone, though the commit of {commit.committer} took it"
            return _fault(offer.fragment, offer.version, key, what, offer.site) if self._terms.keep_log else None
        if stands == offer:
            return None
        is_own = stands is not None and self._roster.fault(stands, offer.site, commit.admissions) is None
        what = f"isn't the offer that the commit of {commit.committer} took"
        return _fault(offer.fragment, offer.version, key, what, offer.site if is_own else None)

    def _payload_fault(self, offer: Offer) -> CorruptObject | None:
        try:
            self.fetch(offer)
        except PayloadUnsound as error:
            return error
        except (KeyMissing, CorruptObject) as error:
            if isinstance(error, KeyMissing) and not self._terms.keep_log:
                return None  # collected, maybe: the replica finds out
            what = f"isn't what its offer states: {error}"
            return _fault(offer.fragment, offer.version, str(offer.payload), what, offer.site)
        return None

    def _find_part(self, closing: Closing, index: int) -> Part | None:
        part = super()._find_part(closing, index)
        if part is not None and part.reducer == NOBODY:
            self.void_parts.append(keys.merged(part.fragment, part.version, index))
        return part

    def _check_merged_payload(self, part: Part) -> None:
        if part.payload is None:
            return
        try:
            sha = sha256_hex(self._store.get_range(part.payload, 0, part.nbytes + 1))
        except KeyMissing:
            if self._terms.keep_log:
                raise _fault(part.fragment, part.version, part.payload, "is gone", part.reducer) from None
            return
        if sha != part.sha256:
            what = f"has bytes of sha256 {sha}: it was changed or cut"
            raise _fault(part.fragment, part.version, part.payload, what, part.reducer)

    def _recompute(self, closing: Closing, part: Part) -> None:
        """Merge a part again from the payloads, where all are kept, and compare: a reducer may have lied."""
        commit, key = closing.commit, keys.merged(part.fragment, part.version, part.part)
        read = self._runtime.map(lambda entry: self._read_slices(entry.offer, part.part, commit), commit.taken)
        vectors: dict[str, Tensor] = {}
        excluded = {refused.site: refused.why for refused in part.excluded}
        for entry, got in zip(commit.taken, read, strict=True):
            if not isinstance(got, str):
                vectors[entry.site] = got
            elif not self._terms.keep_log and self._is_gone(entry.payload):
                return
            elif entry.site not in excluded:
                what = f"isn't what its offer states, though {part.reducer} merged it into part {part.part}: {got}"
                raise _fault(part.fragment, part.version, entry.payload, what, entry.site)
        sound = (
            self._mean(commit, vectors, {entry.site for entry in commit.taken} - vectors.keys()) if vectors else None
        )
        if sound is None and part.payload is None:
            self.num_recomputed += 1
            return
        wronged = next((site for site in vectors if site in excluded), None)
        if wronged is not None:
            what = f"leaves out the offer of {wronged} ({excluded[wronged]}), whose bytes are sound"
            raise _fault(part.fragment, part.version, key, what, part.reducer)
        made = None if sound is None else sha256_hex(sound)
        if made != part.sha256:
            what = f"isn't the mean of the offers taken: it has sha256 {part.sha256}, they make {made}"
            raise _fault(part.fragment, part.version, key, what, part.reducer)
        self.num_recomputed += 1

    def _is_gone(self, payload: str) -> bool:
        try:
            self._store.get_range(payload, 0, 1)
        except KeyMissing:
            return True
        return False


class _Unwritten:
    """A store that is only read: what would be written is dropped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri

    def create(self, key: str, data: bytes) -> bool:
        raise ProtocolError(f"verifying {self.uri} must not create {key}")

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Merging a part anew puts its payload; here only its hash counts."""

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._store.get_range(key, start, length)

    def list(self, prefix: str) -> "list[str]":
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        raise ProtocolError(f"verifying {self.uri} must not delete {key}")

    def close(self) -> None:
        self._store.close()


def _parsed(data: bytes) -> Commit | None:
    try:
        return Commit.from_bytes(data, "commit")
    except CorruptObject:
        return None
