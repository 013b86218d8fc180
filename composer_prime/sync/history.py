"""The last rounds of one fragment, as far as the next one depends on them: what was taken, what was void.

Exactly `max_stale_rounds` rounds, so that a site which starts from a snapshot knows as much as all others.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from composer_prime.errors import CorruptObject
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Commit
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.terms import Terms


@dataclass(frozen=True)
class PastRound:
    """A closed round: what it took, whether its commit was void, and the admission record it honoured."""

    version: int
    taken: dict[str, str]
    void: bool
    admissions: int


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

    @classmethod
    def empty(cls, terms: Terms) -> "History":
        """Before the first round."""
        return cls(deque(maxlen=terms.max_stale_rounds))

    @classmethod
    def read(cls, store: Store, runtime: Runtime, terms: Terms, fragment: int, version: int) -> "History":
        """The window behind `version`, as the commit of that round states it. Raises CorruptObject on a hole."""
        history = cls.empty(terms)
        versions = range(max(0, version - terms.max_stale_rounds), version)
        commits = runtime.map(
            lambda number: find_record(store, Commit, keys.commit(fragment, number)), [*versions, version]
        )
        newest = commits.pop()
        voids = newest.voids if newest is not None else ()
        for number, commit in zip(versions, commits, strict=True):
            if commit is None and number not in voids:
                raise CorruptObject(f"{store.uri} has no sound commit of round {number} of fragment {fragment}")
            history.add(number, None if number in voids else commit)
        return history

    def add(self, version: int, commit: Commit | None) -> None:
        """One more round has closed; None: its commit was void."""
        taken = {} if commit is None else {entry.payload: entry.sha256 for entry in commit.taken}
        admissions = 0 if commit is None else commit.admissions
        self.rounds.append(PastRound(version, taken, commit is None, admissions))
        self.taken = {payload: sha for past in self.rounds for payload, sha in past.taken.items()}

    @property
    def voids(self) -> tuple[int, ...]:
        """Versions whose commits were void."""
        return tuple(past.version for past in self.rounds if past.void)

    @property
    def admissions(self) -> int:
        """The newest admission record that one of these rounds honoured; later ones may not fall behind it."""
        return max((past.admissions for past in self.rounds), default=0)
