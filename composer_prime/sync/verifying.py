"""Rule 17: rebuilds every master from the oldest kept snapshot and the log, and names the first object that differs.

The replay is the sites' own `Replica`, so what is verified is what they compute. Beside it, everything that a site
takes on trust is compared: snapshots, close records, and the parts that reducers merged. Nothing is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing, PayloadUnsound
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


class Verifier:
    """One run under examination. `check` goes through one fragment; no more than one is held in memory."""

    def __init__(self, store: Store) -> None:
        """Raises BadInput when no run is there, ProtocolError when it can't be read, when this machine's arithmetic
        isn't the run's, or when its manifest or a close record is unsound.
        """
        find_manifest(store)
        self._store = store
        self.run = load_run(self._store)
        check_arithmetic(self.run.manifest)
        self._check_fingerprint()
        self._runtime = ThreadRuntime()
        self._roster = Roster(self._store, self.run.manifest, self.run.sha256)
        self._roster.refresh()
        self._close = self._read_close()

    @property
    def is_closed(self) -> bool:
        """Whether the run has ended."""
        return self._close is not None

    def close(self) -> None:
        """Let go of threads. The store stays open."""
        self._runtime.close()

    def check(self, fragment: int, progress: Callable[[int], object] = lambda version: None) -> FragmentReport:
        """Rebuild one fragment's masters and compare them with all that names one.

        progress   called with each version reached

        Raises CorruptObject with the first object that differs.
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
                raise CorruptObject(f"{keys.commit(fragment, replica.version)} can't be merged: {error}") from error
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
                f"{keys.manifest()} states the fingerprint {manifest.fingerprint[:16]}, its parameters make {made[:16]}"
            )

    def _read_close(self) -> Close | None:
        """The close record. Raises CorruptObject when it is unsound."""
        try:
            close = read_record(self._store, Close, keys.close())
        except KeyMissing:
            return None
        if (fault := close_fault(self._roster, close, self.run.terms.final_version)) is not None:
            raise CorruptObject(f"{keys.close()} {fault}")
        if len(close.versions) != len(self.run.fragments):
            raise CorruptObject(f"{keys.close()} isn't a record of {len(self.run.fragments)} fragments")
        return close

    # --- one fragment -----------------------------------------------------------------------------------------------

    def _replica(self, fragment: int, start: Master, stored: list[int]) -> "_Checked":
        try:
            return _Checked(
                self._store, self.run, fragment, runtime=self._runtime, roster=self._roster, start=start, stored=stored
            )
        except KeyMissing:
            gone = keys.commit(fragment, start.version - 1)
            raise CorruptObject(f"{gone} is gone, though a snapshot made by it stands") from None

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
                raise CorruptObject(f"{key} holds no master ({error}): it was changed or cut") from error
            if not sha.startswith(named):
                raise CorruptObject(f"{key} holds a master of sha256 {sha}: it was changed or cut")
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
                    raise CorruptObject(f"{key} is another master than the log names, {sha}")
            return load_master(self._store, self.run, fragment, version, sha)
        raise CorruptObject(f"fragment {fragment}: {self._store.uri} holds no snapshot of it that the log vouches for")

    def _compare(self, replica: Replica, snapshots: Mapping[int, Mapping[str, str]]) -> int:
        """Compare the rebuilt master with all that names one of its version. Returns how many snapshots that were."""
        fragment, master = replica.fragment, replica.master
        stored = snapshots.get(master.version, {})
        for key, sha in stored.items():
            if sha != master.sha256:
                raise CorruptObject(f"{key} is another master than the log makes, {master.sha256}")
        close = self._close
        if close is not None and close.versions[fragment] == master.version:
            if close.masters[fragment] != master.sha256:
                raise CorruptObject(f"{keys.close()} names another master {fragment} than the log makes")
            if close.voids[fragment] != replica.history.voids:
                raise CorruptObject(f"{keys.close()} names other void rounds of fragment {fragment} than the log")
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
            key = keys.commit(fragment, version - 1) if version else keys.manifest()
        elif commit is not None and commit.base_sha != replica.master.sha256 and replica.void_parts_before:
            key = replica.void_parts_before[0]
        raise CorruptObject(f"{key} isn't what the sites took it for: {closed.fault}")

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
        if self._close is not None and self._close.versions[fragment] == version + 1:
            named.append(self._close.masters[fragment])
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
        later += [keys.close()] if self._close is not None and self._close.versions[fragment] > version else []
        if not later:
            return
        if version >= self.run.terms.final_version:
            raise CorruptObject(f"{later[0]} stands behind the run's end, version {version}")
        gone = keys.commit(fragment, version)
        if replica.closing is not None:
            gone = keys.merged(fragment, version, replica.closing.missing_parts()[0])
        raise CorruptObject(f"{gone} is gone, though {later[0]} stands")


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

    def _jump(self) -> list[Round]:
        """Stand on the next snapshot, where garbage collection may have taken what this round was made of (rule 13)."""
        version, after = self.version, self._later()
        key = keys.commit(self.fragment, version)
        if self._terms.keep_log or len(after) < 2:
            raise CorruptObject(f"{key} takes what is gone, and no garbage collection may have deleted it")
        places = (self._store, self._run, self._roster, self.fragment)
        found = (newest_master(*places, at_most=at_most, above=version) for at_most in after)
        master = next((master for master in found if master is not None), None)
        if master is None:
            raise CorruptObject(f"{key} can't be replayed, and no later snapshot is sound")
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
        offers = self._runtime.map(lambda entry: self._offer_fault(entry.offer), commit.taken)
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

    def _offer_fault(self, offer: Offer) -> CorruptObject | None:
        """What is wrong when an offer's own record, where it is kept, isn't the one that the commit took."""
        key = keys.offer(offer.fragment, offer.version, offer.site)
        try:
            stands = Offer.from_bytes(read_bytes(self._store, key), key)
        except CorruptObject:
            stands = None
        except KeyMissing:
            return CorruptObject(f"{key} is gone, though its commit took it") if self._terms.keep_log else None
        return None if stands == offer else CorruptObject(f"{key} isn't the offer that its commit took")

    def _payload_fault(self, offer: Offer) -> CorruptObject | None:
        try:
            self.fetch(offer)
        except PayloadUnsound as error:
            return error
        except (KeyMissing, CorruptObject) as error:
            if isinstance(error, KeyMissing) and not self._terms.keep_log:
                return None  # collected, maybe: the replica finds out
            return CorruptObject(f"{offer.payload} isn't what its offer states: {error}")
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
                raise CorruptObject(f"{part.payload} is gone, though its part's record stands") from None
            return
        if sha != part.sha256:
            raise CorruptObject(f"{part.payload} has bytes of sha256 {sha}: it was changed or cut")

    def _recompute(self, closing: Closing, part: Part) -> None:
        """Merge a part again from the payloads, where all are kept, and compare: a reducer may have lied."""
        commit, key = closing.commit, keys.merged(part.fragment, part.version, part.part)
        read = self._runtime.map(lambda entry: self._read_slices(entry.offer, part.part, commit), commit.taken)
        vectors: dict[str, Tensor] = {}
        excluded = {refused.site for refused in part.excluded}
        for entry, got in zip(commit.taken, read, strict=True):
            if not isinstance(got, str):
                vectors[entry.site] = got
            elif not self._terms.keep_log and self._is_gone(entry.payload):
                return
            elif entry.site not in excluded:
                raise CorruptObject(f"{entry.payload} isn't what its offer states: {got}")
        unread = {entry.site for entry in commit.taken} - vectors.keys()
        mean = self._mean(commit, vectors, unread) if vectors else None
        made = None if mean is None else sha256_hex(mean)
        if made != part.sha256 or (made is not None and unread != excluded):
            raise CorruptObject(f"{key} isn't the mean of the offers that its commit takes")
        self.num_recomputed += 1

    def _is_gone(self, payload: str) -> bool:
        try:
            self._store.get_range(payload, 0, 1)
        except KeyMissing:
            return True
        return False


def _parsed(data: bytes) -> Commit | None:
    try:
        return Commit.from_bytes(data, "commit")
    except CorruptObject:
        return None
