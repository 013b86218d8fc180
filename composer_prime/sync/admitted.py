"""Who was admitted under which admission record, remembered by what each record changed.

Every record is the whole list, so that thousands of sites, admitted one after another, would be remembered thousands of
times each.
"""

from bisect import bisect_right
from typing import NamedTuple

from composer_prime.sync.records import Admission

KEPT = 8
"""Lists of guests kept as they were last asked for: rounds name the last few admissions."""


class Standing(NamedTuple):
    """What a record made of a site: its key, or none, and whether it is a guest."""

    key: str | None = None
    guest: bool = False


class AdmittedBy:
    """Keys and guests by admission number, the first one 0. One thread adds; any may ask meanwhile."""

    def __init__(self, first: Admission) -> None:
        self._numbers: dict[str, list[int]] = {}
        self._standings: dict[str, list[Standing]] = {}
        self._guests: dict[int, frozenset[str]] = {}
        self.newest = -1
        """The number of the last record."""
        self.keys: dict[str, str] = {}
        """Public key by site under the newest record; never changed, but replaced."""
        self.add(first)

    def add(self, record: Admission | None) -> None:
        """The next record; None: it repeats the one before."""
        number = self.newest + 1
        if record is not None:
            guests = set(record.guests)
            for site in self._numbers.keys() | record.keys.keys() | guests:
                standing = Standing(record.keys.get(site), site in guests)
                if standing != self._standing(site, number):
                    self._standings.setdefault(site, []).append(standing)
                    self._numbers.setdefault(site, []).append(number)
            self.keys = dict(record.keys)
        self.newest = number

    def key_of(self, site: str, number: int) -> str | None:
        """Its public key under that record."""
        return self._standing(site, number).key

    def guests(self, number: int) -> frozenset[str]:
        """Sites that may offer under that record, and neither commit nor merge nor close."""
        known = self._guests.get(number)
        if known is None:
            known = frozenset(site for site in list(self._numbers) if self._standing(site, number).guest)
            while len(self._guests) >= KEPT:
                self._guests.pop(next(iter(list(self._guests))), None)
            self._guests[number] = known
        return known

    def last_of(self, site: str, public: str | None = None) -> int | None:
        """The number of the last record that has the site, with that key (None: with any); None: none has."""
        until, numbers = self.newest, self._numbers.get(site, [])[:]
        for number, standing in zip(
            reversed(numbers), reversed(self._standings.get(site, [])[: len(numbers)]), strict=True
        ):
            if standing.key is not None and public in (None, standing.key):
                return until
            until = number - 1
        return None

    def held_by(self, public: str) -> str | None:
        """The site that has, or was the last one to have, that key; None: nobody ever had it."""
        found = ((self.last_of(site, public), site) for site in sorted(list(self._numbers)))
        held = [(number, site) for number, site in found if number is not None]
        return max(held, key=lambda each: each[0])[1] if held else None

    def _standing(self, site: str, number: int) -> Standing:
        """Records that are being added meanwhile have higher numbers, so they don't matter."""
        at = bisect_right(self._numbers.get(site, []), number)
        return self._standings[site][at - 1] if at else Standing()
