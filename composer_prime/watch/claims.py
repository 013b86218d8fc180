"""What guests say that they trained, bounded by what members did: tokens are their own word, and decide nothing.

A guest's tokens of a merged offer count up to the median of the members' in the rounds since its last one.
"""

import statistics
from collections.abc import Collection, Sequence

from composer_prime.sync.records import Taken
from composer_prime.sync.roster import Roster
from composer_prime.watch.rounds import FragmentRounds


def guests_of(roster: Roster, sites: Collection[str]) -> set[str]:
    """Those that were guests when they were last admitted; revoking one doesn't make it a member."""
    admissions = {site: roster.last_admission_of(site) for site in sites} if roster.signed else {}
    return {
        site for site, number in admissions.items() if number is not None and site in roster.authority(number).guests
    }


class MembersWork:
    """Median tokens of the members' offers, by fragment and round.

    window   rounds that an offer's work may go back (`max_stale_rounds`)
    """

    def __init__(self, rounds: Sequence[FragmentRounds], guests: Collection[str], window: int) -> None:
        self._window = window
        self._medians = [
            [
                statistics.median([entry.tokens for entry in each.taken(version) if entry.site not in guests] or [0])
                for version in range(each.version)
            ]
            for each in rounds
        ]

    def credited(self, taken: Sequence[tuple[int, int, Taken]]) -> float:
        """Tokens that a guest's (fragment, version, entry) may count, as the mean over fragments."""
        last, total = dict.fromkeys(range(len(self._medians)), -1), 0.0
        for fragment, version, entry in taken:  # a fragment's rounds come in order
            since = max(last[fragment] + 1, version - self._window)
            total += min(entry.tokens, sum(self._medians[fragment][since : version + 1]))
            last[fragment] = version
        return total / len(self._medians)

    @property
    def most(self) -> float:
        """Tokens of a member that took part in all rounds, as the mean over fragments; twice the last round's for the
        one that is open."""
        return sum(sum(medians) + sum(medians[-1:]) for medians in self._medians) / len(self._medians)
