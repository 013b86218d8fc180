"""Who is in the run: claims, beats, and liveness as one observer sees it.

Liveness (rule 6) is judged on the observer's own monotonic clock since a beat last changed, for the newest incarnation
of a name only. Clocks of different sites are never compared; a wrong view costs time, never safety.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_prime.errors import CorruptObject, KeyMissing, Superseded
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.records import Beat, Claim, SiteState, sha256_hex

WAITED_FOR: frozenset[SiteState] = frozenset({"live"})
"""States in which a silent site holds up a round until it times out."""


def claim_incarnation(store: Store, site: str) -> int:
    """Take the next free incarnation of `site`, create-once, and return its number.

    A process of the same name that is still running finds the higher incarnation at its next beat and stops.
    """
    nonce = os.urandom(8).hex()
    while True:
        number = newest_incarnation(store, site) + 1
        record = Claim(site=site, incarnation=number, nonce=nonce, host=socket.gethostname(), pid=os.getpid())
        if store.create(keys.claim(site, number), record.to_bytes()):
            return number


def newest_incarnation(store: Store, site: str) -> int:
    """The highest incarnation of `site` that was ever claimed; -1 when there is none."""
    numbers = [keys.parse_claim(key)[1] for key in store.list(keys.site_prefix(site)) if keys.is_claim(key)]
    return max(numbers, default=-1)


class Pulse:
    """Writes this process's own beat, and notices when another process took its name."""

    def __init__(self, store: Store, site: str, incarnation: int) -> None:
        self._store = store
        self._site = site
        self._incarnation = incarnation
        self._counter = 0

    def beat(self, state: SiteState, versions: tuple[int, ...], inner_step: int, trained_tokens: int) -> None:
        """Overwrite this incarnation's beat. Raises Superseded when a higher incarnation has been claimed."""
        newest = newest_incarnation(self._store, self._site)
        if newest > self._incarnation:
            raise Superseded(
                f"site {self._site} was started again as incarnation {newest}, this process is {self._incarnation}: "
                "it stops; give each running process a site name of its own"
            )
        self._counter += 1
        record = Beat(
            site=self._site,
            incarnation=self._incarnation,
            counter=self._counter,
            state=state,
            versions=versions,
            inner_step=inner_step,
            trained_tokens=trained_tokens,
        )
        self._store.put(keys.beat(self._site, self._incarnation), record.to_bytes())


@dataclass
class _Sighting:
    digest: str
    changed_at: float
    beat: Beat


@dataclass
class Members:
    """One observer's view of all sites. `observe` reads the bucket; the rest answers from what was read."""

    store: Store
    liveness_s: float
    _seen: dict[str, _Sighting] = field(default_factory=dict)

    def observe(self, now: float) -> None:
        """Read the newest beat of every site; `now` is this observer's monotonic clock in seconds."""
        newest: dict[str, int] = {}
        for key in self.store.list(keys.sites_prefix()):
            if keys.is_claim(key):
                site, incarnation = keys.parse_claim(key)
                newest[site] = max(incarnation, newest.get(site, -1))
        for site, incarnation in newest.items():
            self._look_at(site, incarnation, now)

    def _look_at(self, site: str, incarnation: int, now: float) -> None:
        key = keys.beat(site, incarnation)
        try:
            data = self.store.get(key)
            beat = Beat.from_bytes(data, key)
        except KeyMissing:
            self._seen.pop(site, None)  # claimed, not beating yet: joining
            return
        except CorruptObject:
            return  # not a sign of life; the last good one ages
        digest = sha256_hex(data)
        known = self._seen.get(site)
        if known is None or known.digest != digest:
            self._seen[site] = _Sighting(digest, now, beat)

    def live(self, now: float) -> frozenset[str]:
        """Sites that a round waits for: state live, and a beat that changed within `liveness_s`."""
        return frozenset(
            site
            for site, seen in self._seen.items()
            if seen.beat.state in WAITED_FOR and now - seen.changed_at <= self.liveness_s
        )

    def beats(self) -> Mapping[str, Beat]:
        """The newest beat of every site ever seen, dead or alive."""
        return {site: seen.beat for site, seen in self._seen.items()}
