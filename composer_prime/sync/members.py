"""Who is in the run: claims, beats, and liveness as one observer sees it.

Liveness (rule 6) is judged on the observer's own monotonic clock since a beat last changed, for the newest incarnation
of a name only. Clocks of different sites are never compared; a wrong view costs time, never safety.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_prime.errors import ConfigError, CorruptObject, KeyMissing, Superseded
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Beat, Claim, SiteState
from composer_prime.sync.roster import Roster
from composer_prime.sync.runtime import Runtime

WAITED_FOR: frozenset[SiteState] = frozenset({"live"})
"""States in which a silent site holds up a round until it times out."""
PRESENT: frozenset[SiteState] = frozenset({"live", "joining"})
"""States in which a site still needs what it has pinned."""
MAX_BEAT_BYTES = 256 * 2**10
"""Longest beat that counts: every site's is read again and again, and kept. Ten thousand fragments make 200 kB."""


def claim_incarnation(store: Store, site: str, roster: Roster, judged: int | None = None) -> int:
    """Take the next free incarnation of `site`, create-once.

    A process of the same name that is still running finds the higher incarnation at its next beat and stops.

    judged   the incarnation after which the name was free; ConfigError when another process has claimed it since
    """
    nonce = os.urandom(8).hex()
    number = (newest_incarnation(store, site, roster) if judged is None else judged) + 1
    while True:
        record = Claim(site=site, incarnation=number, nonce=nonce, host=socket.gethostname(), pid=os.getpid())
        key, data = keys.claim(site, number), roster.sign(record).to_bytes()
        if store.create(key, data):
            return number
        if judged is not None:
            newest = newest_incarnation(store, site, roster, above=judged)  # a forged claim is none
            if newest > judged:
                raise _name_is_taken(site, newest)
        number += 1


def _name_is_taken(site: str, incarnation: int) -> ConfigError:
    return ConfigError(
        f"site {site} already runs as incarnation {incarnation}: give this process a site name of its own, or set "
        'site.same_name = "replace" to take the name over'
    )


def newest_incarnation(store: Store, site: str, roster: Roster, above: int = -1, admissions: int | None = None) -> int:
    """The highest incarnation of `site` that was soundly claimed, where it is above `above`; else `above`.

    admissions   the admission record by which claims are judged; None: the last one known
    """
    numbers = [keys.parse_claim(key)[1] for key in store.list(keys.site_prefix(site)) if keys.is_claim(key)]
    for number in sorted(numbers, reverse=True):
        if number <= above:
            break
        if not roster.signed or is_own_claim(store, site, number, roster, admissions):
            return number
    return above


def is_own_claim(store: Store, site: str, incarnation: int, roster: Roster, admissions: int | None = None) -> bool:
    """Whether a claim is one that its site signed, for that incarnation: a copy of another of its claims is none."""
    claim = find_record(store, Claim, keys.claim(site, incarnation))
    if claim is None or (claim.site, claim.incarnation) != (site, incarnation):
        return False
    return roster.fault(claim, site, admissions) is None


def check_name_is_free(store: Store, runtime: Runtime, site: str, roster: Roster, patience_s: float) -> int:
    """The newest incarnation of a name that nobody uses; -1: it was never used.

    Raises ConfigError when another process of this name is alive: its beat changes, or comes, within `patience_s`.
    """
    number = newest_incarnation(store, site, roster)
    if number < 0:
        return number
    key = keys.beat(site, number)
    first = find_record(store, Beat, key)  # None: claimed, and not beating yet
    if first is not None and first.state not in PRESENT:
        return number
    waiting, until = runtime.condition(), runtime.now() + patience_s
    while runtime.now() < until:
        with waiting:
            waiting.wait(timeout=patience_s / 10)
        beat = find_record(store, Beat, key)
        if beat is not None and (first is None or beat.counter != first.counter):
            raise _name_is_taken(site, number)
    return number


class Pulse:
    """Writes this process's own beat, and notices when another process took its name."""

    def __init__(self, store: Store, site: str, incarnation: int, roster: Roster) -> None:
        self._store = store
        self._site = site
        self._incarnation = incarnation
        self._roster = roster
        self._counter = 0

    def check(self) -> None:
        """Raise Superseded when another process has claimed this site's name, at a higher incarnation."""
        newest = newest_incarnation(self._store, self._site, self._roster, above=self._incarnation)
        if newest > self._incarnation:
            raise Superseded(
                f"site {self._site} was started again as incarnation {newest}, this process is {self._incarnation}: "
                "it stops; give each running process a site name of its own"
            )

    def beat(
        self, state: SiteState, versions: tuple[int, ...], pins: tuple[int, ...], inner_step: int, trained_tokens: int
    ) -> None:
        """Overwrite this incarnation's beat. Raises Superseded as `check` does."""
        self.check()
        self._counter += 1
        record = Beat(
            site=self._site,
            incarnation=self._incarnation,
            counter=self._counter,
            state=state,
            versions=versions,
            inner_step=inner_step,
            trained_tokens=trained_tokens,
            pins=pins,
        )
        self._store.put(keys.beat(self._site, self._incarnation), self._roster.sign(record).to_bytes())


@dataclass
class _Sighting:
    digest: str
    changed_at: float
    beat: Beat


@dataclass
class Members:
    """One observer's view of all sites. `observe` reads the bucket; the rest answers from what was read."""

    store: Store
    runtime: Runtime
    roster: Roster
    liveness_s: float
    _seen: dict[str, _Sighting] = field(default_factory=dict)
    _claims: dict[tuple[str, int], tuple[str | None, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._observing = self.runtime.lock()
        self._newest: dict[str, int] = {}

    def observe(self) -> None:
        """Read the newest beat of every site. Thread-safe."""
        with self._observing:
            self._read_beats(self._list())

    def notice_newcomers(self) -> None:
        """As `observe`, but read beats only when somebody has come since, or was about to: one request otherwise."""
        with self._observing:
            newest = self._list()
            beating = {site for site, seen in self._seen.items() if seen.beat.state != "joining"}
            if newest != self._newest or not newest.keys() <= beating:  # who was revoked is still among those seen
                self._read_beats(newest)

    def _list(self) -> dict[str, int]:
        """The newest incarnation of every site that claims its name soundly."""
        claimed: dict[str, list[int]] = {}
        for key in self.store.list(keys.sites_prefix()):
            if keys.is_claim(key):
                site, incarnation = keys.parse_claim(key)
                claimed.setdefault(site, []).append(incarnation)
        sound = {
            site: next((each for each in sorted(incarnations, reverse=True) if self._is_sound(site, each)), None)
            for site, incarnations in claimed.items()
        }
        return {site: incarnation for site, incarnation in sound.items() if incarnation is not None}

    def _read_beats(self, newest: dict[str, int]) -> None:
        self._newest = newest
        found = self.runtime.map(lambda item: self._read(*item), sorted(newest.items()))
        now = self.runtime.now()
        for site, data in zip(sorted(newest), found, strict=True):
            self._look_at(site, newest[site], data, now)

    def _is_sound(self, site: str, incarnation: int) -> bool:
        """Whether a claim is its site's own; each is read once for a key that its site has, and only where claims are
        signed: it may have been seen before the admission that makes it sound, or be of a key that was taken away."""
        if not self.roster.signed:
            return True
        public = self.roster.admitted().get(site)
        known = self._claims.get((site, incarnation))
        if known is None or known[0] != public:
            known = self._claims[site, incarnation] = public, is_own_claim(self.store, site, incarnation, self.roster)
        return known[1]

    def _read(self, site: str, incarnation: int) -> bytes | None:
        try:
            return self.store.get_range(keys.beat(site, incarnation), 0, MAX_BEAT_BYTES + 1)
        except KeyMissing:
            return None

    def _look_at(self, site: str, incarnation: int, data: bytes | None, now: float) -> None:
        if data is None:
            self._seen.pop(site, None)  # claimed, not beating yet: joining
            return
        known, digest = self._seen.get(site), sha256_hex(data)
        if (known is not None and known.digest == digest) or len(data) > MAX_BEAT_BYTES:
            return
        try:
            beat = Beat.from_bytes(data, keys.beat(site, incarnation))
        except CorruptObject:
            return  # not a sign of life; the last good one ages
        if self.roster.fault(beat, site) is None and (beat.site, beat.incarnation) == (site, incarnation):
            self._seen[site] = _Sighting(digest, now, beat)

    def live(self, now: float) -> frozenset[str]:
        """Sites that a round waits for: state live, and a beat that changed within `liveness_s`."""
        return frozenset(site for site, beat in self._alive(now) if beat.state in WAITED_FOR)

    def pins(self, now: float) -> list[tuple[int, ...]]:
        """The pins of every site that is there, waited for or not."""
        return [beat.pins for _, beat in self._alive(now) if beat.state in PRESENT]

    def _alive(self, now: float) -> list[tuple[str, Beat]]:
        seen = list(self._seen.items())
        return [(site, sighting.beat) for site, sighting in seen if now - sighting.changed_at <= self.liveness_s]

    def incarnation(self, site: str) -> int:
        """The newest incarnation of a site that was seen to beat; -1 when none was."""
        seen = self._seen.get(site)
        return -1 if seen is None else seen.beat.incarnation

    def beats(self) -> Mapping[str, Beat]:
        """The newest beat of every site ever seen, dead or alive."""
        return {site: seen.beat for site, seen in self._seen.items()}
