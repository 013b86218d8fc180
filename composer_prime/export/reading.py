"""Masters for those who don't train: which versions the bucket holds, and their values, each checked by its hash.

A master comes from its snapshot or, where none is stored, from an older one and the log, as a joiner would make it.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from composer_prime.errors import BadInput, CorruptObject, KeyMissing, ProtocolError, RunGone, StoreError
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.history import find_commit, voids_among
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.records import Commit
from composer_prime.sync.replica import rebuild_master
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import load_run
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.snapshots import Master, load_master, stored_nbytes, vouched_sha, vouched_snapshots

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Merged:
    """What rounds have merged: tokens by site, the mean over fragments (a step trains all), and rounds that were void.

    rounds   of all fragments together, `void` of them without an offer taken
    """

    tokens: Mapping[str, int]
    rounds: int
    void: int


class MasterReader:
    """A run's bucket, only read. `close` lets go of its threads; the store stays open."""

    def __init__(self, store: Store) -> None:
        """Raises BadInput when no run is there."""
        find_manifest(store)
        self.store = store
        self.run = load_run(store)
        self.roster = Roster(store, self.run.manifest, self.run.sha256)
        self.roster.refresh()
        self.runtime = ThreadRuntime()

    def refresh(self) -> None:
        """Look again who is admitted and how long the run goes on. Raises RunGone when another run stands here."""
        try:
            run = load_run(self.store)
        except KeyMissing:
            raise RunGone(f"{self.store.uri} no longer holds the run {self.run.manifest.run}: it was deleted") from None
        if run.sha256 != self.run.sha256:
            raise RunGone(f"{self.store.uri} holds another run than {self.run.manifest.run} now: start again on it")
        self.run = run
        self.roster.refresh()

    def close(self) -> None:
        """Let go of threads."""
        self.runtime.close()

    def newest_version(self) -> int:
        """The newest version that every fragment has reached with a stored snapshot that the log vouches for.

        Raises CorruptObject when a fragment has none.
        """
        return min(self._newest_stored(fragment) for fragment in range(len(self.run.fragments)))

    def check_version(self, version: int) -> None:
        """Raise BadInput unless every fragment has had `version` rounds."""
        for fragment in range(len(self.run.fragments)):
            if version == 0:
                continue
            try:
                self.store.get_range(keys.commit(fragment, version - 1), 0, 1)
            except KeyMissing:
                raise BadInput(
                    f"version ({version}) isn't there yet: fragment {fragment} of run {self.run.manifest.run} hasn't "
                    f"had so many rounds, the newest that all have stored is {self.newest_version()}: name one up to it"
                ) from None

    def nbytes(self, version: int) -> int:
        """What all fragments' masters after `version` rounds take to fetch; as plain fp32 where no snapshot says so."""

        def of(fragment: int) -> int:
            sha = self.vouched(fragment, version)
            if sha is not None:
                with suppress(KeyMissing, CorruptObject):
                    return stored_nbytes(self.store, self.run, fragment, version, sha)
            return self.run.master_nbytes(fragment)

        return sum(self.runtime.map(of, range(len(self.run.fragments))))

    def vouched(self, fragment: int, version: int) -> str | None:
        """The hash by which the log names master(fragment, version); None while nothing names it."""
        return vouched_sha(self.store, self.run, self.roster, fragment, version)

    def master(self, fragment: int, version: int) -> Master:
        """master(fragment, version), checked by the hash that the log names where it names one already.

        Raises StoreError when the fragment hasn't come so far, or when garbage collection took what it is made of (a
        newer one is there then), ProtocolError when the log names another.
        """
        sha = self.vouched(fragment, version)
        if sha is not None:
            try:
                return load_master(self.store, self.run, fragment, version, sha)
            except KeyMissing:
                logger.info("master_rebuilt fragment=%d version=%d reason=no snapshot", fragment, version)
            except CorruptObject as error:
                logger.warning("master_rebuilt fragment=%d version=%d reason=%s", fragment, version, error)
        master = self._rebuilt(fragment, version)
        if sha not in (None, master.sha256):
            raise CorruptObject(
                f"fragment {fragment} version {version}: the log makes {master.sha256[:16]} here and names "
                f"{str(sha)[:16]}: run `composer-prime verify` on {self.store.uri}"
            )
        return master

    def _rebuilt(self, fragment: int, version: int) -> Master:
        try:
            return rebuild_master(self.store, self.run, fragment, version, runtime=self.runtime, roster=self.roster)
        except ProtocolError as error:
            if self._newest_stored(fragment) <= version:
                raise
            raise StoreError(
                f"{self.store.uri} no longer holds what version {version} of fragment {fragment} is made of ({error}): "
                f"take a newer one, all have stored {self.newest_version()}"
            ) from error

    def merged(self, version: int) -> Merged:
        """What the rounds before `version` merged, as their commits tell."""
        tokens: dict[str, int] = {}
        num_void = 0
        fragments = range(len(self.run.fragments))
        for fragment in fragments:
            commits = self._commits(fragment, version)
            voids = voids_among(range(len(commits)), commits, ())
            for number, commit in enumerate(commits[:version]):
                taken = () if commit is None or number in voids else commit.taken
                num_void += not taken
                for entry in taken:
                    tokens[entry.site] = tokens.get(entry.site, 0) + entry.tokens
        means = {site: round(count / len(fragments)) for site, count in sorted(tokens.items())}
        return Merged(means, version * len(fragments), num_void)

    def _commits(self, fragment: int, version: int) -> Sequence[Commit | None]:
        """The commits before `version`, and the one of it, which tells of voids, where it stands; None for what no site
        put there that may commit."""
        found = self.runtime.map(lambda at: find_commit(self.store, self.roster, fragment, at), range(version + 1))
        return found if found[-1] is not None else found[:-1]

    def _newest_stored(self, fragment: int) -> int:
        found = next(vouched_snapshots(self.store, self.run, self.roster, fragment), None)
        if found is None:
            raise CorruptObject(
                f"{self.store.uri} holds no snapshot of fragment {fragment} that its log vouches for: "
                "restore masters/ from a backup"
            )
        return found[0]
