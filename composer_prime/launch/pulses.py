"""The beats of a launch's sites as one supervisor has seen them change, for its watchdog.

A site's beat comes from a task of its own and goes on while training hangs; so the inner step that it tells counts,
too. A site that waits for others makes no step either, and is known by its offer.
"""

from dataclasses import dataclass, replace

from composer_prime.launch.decisions import Pulse
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Beat


@dataclass(frozen=True)
class _Sighting:
    attempt: int
    beat: Beat | None
    waits: bool = False


class Pulses:
    """What is known of each site's present attempt; `observe` reads the bucket."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, _Sighting] = {}
        self.known: dict[str, Pulse] = {}

    def observe(self, site: str, attempt: int, ticks: float) -> None:
        """Look at the newest beat of a site whose attempt is running. ticks: monotonic seconds."""
        beat, last = self._read(site), self._seen.get(site)
        if last is None or last.attempt != attempt:
            self._seen[site], self.known[site] = _Sighting(attempt, beat), Pulse(running_since=ticks)
        elif beat is not None and beat != last.beat:
            self._look_at(site, beat, last, ticks)

    def _look_at(self, site: str, beat: Beat, last: _Sighting, ticks: float) -> None:
        pulse = replace(self.known[site], changed_at=ticks, state=beat.state)
        waits = False
        if last.beat is None or beat.incarnation != last.beat.incarnation:
            pulse = replace(pulse, stood_since=ticks, has_stepped=False)
        elif beat.inner_step != last.beat.inner_step:
            pulse = replace(pulse, stood_since=ticks, has_stepped=True)
        else:
            waits = self._waits(beat)
            # Its round may have closed only since the last look, and its next step is still to come.
            if waits or last.waits or pulse.stood_since is None:
                pulse = replace(pulse, stood_since=ticks)
        self._seen[site], self.known[site] = _Sighting(last.attempt, beat, waits), pulse

    def _waits(self, beat: Beat) -> bool:
        """Whether an offer of this site is out in a round that nobody has closed."""
        return any(
            self._stands(keys.offer(fragment, version, beat.site)) and not self._stands(keys.commit(fragment, version))
            for fragment, version in enumerate(beat.versions)
        )

    def _stands(self, key: str) -> bool:
        return key in self._store.list(key)

    def _read(self, site: str) -> Beat | None:
        beats = [key for key in self._store.list(keys.site_prefix(site)) if keys.is_beat(key)]
        return find_record(self._store, Beat, max(beats)) if beats else None
