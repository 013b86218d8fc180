"""The last rounds of one fragment, as far as the next one depends on them: what was taken, what was void.

Exactly `max_stale_rounds` rounds, so that a site which starts from a snapshot knows as much as all others.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from composer_prime.errors import CorruptObject
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.lifetime import find_close
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Commit
from composer_prime.sync.roster import Roster
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.terms import Terms


def find_commit(store: Store, roster: Roster, fragment: int, version: int) -> Commit | None:
    """The commit of a round as a site made it that may commit; None when there is none. It may be void all the same."""
    commit = find_record(store, Commit, keys.commit(fragment, version))
    if commit is None or not commit.is_at(fragment, version) or roster.author_fault(commit) is not None:
        return None
    return commit


@dataclass(frozen=True)
class PastRound:
    """A closed round: what it took, and whether its commit was void."""

    version: int
    taken: dict[str, str]
    void: bool


def voids_among(versions: Sequence[int], commits: Sequence[Commit | None], known: Iterable[int]) -> set[int]:
    """Which of these rounds were void: those known, and further back those that a later sound commit says were.

    versions   consecutive, oldest first, with what stands as their commits
    known      the void rounds of the window behind the last one (`History.voids`)
    """
    voids = set(known)
    for version, commit in zip(reversed(versions), reversed(commits), strict=True):
        if commit is not None and version not in voids:
            voids.update(commit.voids)
    return voids


@dataclass
class History:
    """The window of past rounds behind one version."""

    rounds: deque[PastRound] = field(default_factory=deque)
    taken: dict[str, str] = field(default_factory=dict)
    """sha256 by key of the payloads that these rounds took."""
    floor: int = 0
    """The newest admission record that a commit has honoured, void or not; later ones may not fall behind it."""

    @classmethod
    def empty(cls, terms: Terms) -> "History":
        """Before the first round."""
        return cls(deque(maxlen=terms.max_stale_rounds))

    @classmethod
    def read(
        cls,
        store: Store,
        runtime: Runtime,
        terms: Terms,
        roster: Roster,
        fragment: int,
        version: int,
    ) -> "History":
        """The window behind `version`, as the commit of that round or the close record states it.

        Raises CorruptObject on a hole.
        """
        history = cls.empty(terms)
        versions = range(max(0, version - terms.max_stale_rounds), version)
        commits = runtime.map(lambda number: find_commit(store, roster, fragment, number), [*versions, version])
        newest = commits.pop()
        voids = () if newest is None else newest.voids
        if version == terms.final_version:  # a commit there is no commit
            newest, close = None, find_close(store, roster, version)
            voids = close.voids[fragment] if close is not None and len(close.voids) > fragment else ()
        for number, commit in zip(versions, commits, strict=True):
            if commit is None and number not in voids:
                raise CorruptObject(f"{store.uri} has no sound commit of round {number} of fragment {fragment}")
            history.add(number, None if number in voids else commit)
        for commit in [*commits, newest] if version > 0 else []:
            if commit is not None:
                history.honour(commit)
        return history

    def honour(self, commit: Commit) -> None:
        """A site that may commit has made this commit: who is revoked can't bring an older admission back, after any
        number of void rounds."""
        self.floor = max(self.floor, commit.admissions)

    def add(self, version: int, commit: Commit | None) -> None:
        """One more round has closed; None: its commit was void."""
        taken = {} if commit is None else {entry.payload: entry.sha256 for entry in commit.taken}
        self.rounds.append(PastRound(version, taken, commit is None))
        self.taken = {payload: sha for past in self.rounds for payload, sha in past.taken.items()}

    @property
    def voids(self) -> tuple[int, ...]:
        """Versions whose commits were void."""
        return tuple(past.version for past in self.rounds if past.void)
