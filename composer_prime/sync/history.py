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
from composer_prime.sync.records import Close, Commit
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
    all_voids: set[int] = field(default_factory=set)
    """Versions whose commits were void, those before the window too, as far as they are known."""

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
        ends: tuple[int, ...],
    ) -> "History":
        """The window behind `version`, as the commit of that round or a close record states it.

        ends   version at which each close record ends the run (`lifetime.prolonged`)

        Raises CorruptObject on a hole.
        """
        history = cls.empty(terms)
        versions = range(max(0, version - terms.max_stale_rounds), version)
        commits = runtime.map(lambda number: find_commit(store, roster, fragment, number), [*versions, version])
        newest = commits.pop()
        voids = () if newest is None else newest.voids
        close = None
        if newest is None or version in ends:  # at an end nobody has judged the commit after it yet
            close = _close_at(store, roster, fragment, version, ends, by_member=newest is not None)
        if close is not None:
            voids, history.floor = close.voids[fragment], close.floors[fragment]
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
        if commit is None:
            self.all_voids.add(version)
        self.taken = {payload: sha for past in self.rounds for payload, sha in past.taken.items()}

    @property
    def voids(self) -> tuple[int, ...]:
        """Versions whose commits were void."""
        return tuple(past.version for past in self.rounds if past.void)


def _close_at(
    store: Store, roster: Roster, fragment: int, version: int, ends: tuple[int, ...], *, by_member: bool
) -> Close | None:
    """The close record of a run that ended before round `version`, which no commit need follow; None where none is.

    One of a site that is admitted now comes before any other's: who was revoked may still write one.

    by_member   only such a one: where a commit follows, no other's word is needed
    """
    others: Close | None = None
    for number in reversed([number for number, end in enumerate(ends) if end == version]):
        close = find_close(store, roster, number, version)
        if close is None or len(close.versions) <= fragment:
            continue
        if roster.fault(close, close.closed_by) is None:
            return close
        others = others or close
    return None if by_member else others
