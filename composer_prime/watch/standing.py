"""How a site's offers stood to the rounds that took them: who was clipped, who pointed away, who signed two.

The clip follows from the commits. What only payloads show is on tapes, which are their writers' own word: of a round
that many merged the middle one counts, and of a second record the word of who closed the round, or of two others.
"""

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypedDict

from composer_prime.sync.records import Commit
from composer_prime.sync.terms import Terms
from composer_prime.sync.validity import clipped
from composer_prime.watch.rounds import MAX_PARTS, FragmentRounds
from composer_prime.watch.tapes import WHOLE, TapeFacts, is_against


class Stood(TypedDict):
    """As `SiteStatus` has it."""

    rounds_clipped: int
    least_clip: float | None
    rounds_against: int
    rounds_equivocated: int


class Standing:
    """What the log and the tapes say of every site."""

    def __init__(
        self,
        rounds: Sequence[FragmentRounds],
        tapes: Mapping[str, TapeFacts],
        terms: Terms,
        guests: Collection[str],
    ) -> None:
        self._guests = guests
        self._clips: dict[str, list[float]] = defaultdict(list)
        self._against: dict[str, int] = defaultdict(int)
        self._equivocated: dict[str, int] = defaultdict(int)
        for fragment in rounds:
            for version in range(fragment.version):
                if fragment.taken(version):
                    self._count(fragment.commits[version], tapes, terms)

    def _count(self, commit: Commit, tapes: Mapping[str, TapeFacts], terms: Terms) -> None:
        """A round that took something."""
        parts = range(min(commit.num_parts, MAX_PARTS)) if commit.num_parts else (WHOLE,)
        teller = tapes.get(commit.committer)
        for site, factor in clipped(commit.taken, terms, self._guests).items():
            self._clips[site].append(factor)
        for entry in commit.taken:
            place = (commit.fragment, commit.version, entry.site)
            told = [tape.agreement[place] for tape in tapes.values() if place in tape.agreement]
            self._against[entry.site] += is_against(_merged(told, parts))
            others = sum(place in tape.second for site, tape in tapes.items() if site != entry.site)
            self._equivocated[entry.site] += others > 1 or (teller is not None and place in teller.second)

    def of(self, site: str) -> Stood:
        """One site's part in it."""
        return {
            "rounds_clipped": len(self._clips[site]),
            "least_clip": min(self._clips[site], default=None),
            "rounds_against": self._against[site],
            "rounds_equivocated": self._equivocated[site],
        }


def _merged(told: Sequence[Mapping[int, float]], parts: Iterable[int]) -> dict[int, float]:
    """Of each part what the middle one of its tellers says; of two the higher one."""
    by_part = {part: [agreement[part] for agreement in told if part in agreement] for part in parts}
    return {part: statistics.median_high(cosines) for part, cosines in by_part.items() if cosines}
