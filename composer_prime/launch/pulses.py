"""The beats of a launch's sites as one supervisor has seen them change, and which of them it takes for hanging.

A site's beat comes from a task of its own and goes on while training hangs; so the inner step that it tells counts,
too. A site that waits for others makes no step either, and is known by its offer.
"""

import math
from dataclasses import dataclass, replace

from composer_prime.launch.budget import Limits
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Beat

STARTUP_PATIENCE = 4
"""Times its limit that a replica may take to its first beat and step, and from its last beat: it loads, and it ends."""
ENDING_STATES = frozenset({"done", "leaving"})


@dataclass(frozen=True)
class Pulse:
    """A site's beat as this supervisor has seen it; times on its own monotonic clock.

    running_since   when it first saw the present attempt running
    changed_at      when it first saw the beat as it is now; None: no change since `running_since`
    state           that the beat tells
    stood_since     when it first saw the inner step as it is now, or last saw the site wait for a round with its offer
                    out; None: no beat since `running_since`
    has_stepped     whether it has seen the present attempt make an inner step
    """

    running_since: float
    changed_at: float | None = None
    state: str = ""
    stood_since: float | None = None
    has_stepped: bool = False


class Pulses:
    """The pulse of each site's present attempt; `observe` reads the bucket."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, tuple[int, Beat | None, bool]] = {}
        """Each site's attempt, its newest beat, and whether it waited then."""
        self.known: dict[str, Pulse] = {}

    def observe(self, site: str, attempt: int, ticks: float) -> None:
        """Look at the newest beat of a site whose attempt is running. ticks: monotonic seconds."""
        beats = [key for key in self._store.list(keys.site_prefix(site)) if keys.is_beat(key)]
        beat = find_record(self._store, Beat, max(beats)) if beats else None
        last_attempt, last, waited = self._seen.get(site, (0, None, False))
        if last_attempt != attempt:
            self._seen[site], self.known[site] = (attempt, beat, False), Pulse(running_since=ticks)
        elif beat is not None and beat != last:
            pulse = self.known[site]
            is_new = last is None or beat.incarnation != last.incarnation
            moved = last is None or is_new or beat.inner_step != last.inner_step
            waits = not moved and self._waits(beat)
            # Its round may have closed only since the last look, and its next step is still to come.
            since = ticks if moved or waits or waited or pulse.stood_since is None else pulse.stood_since
            steps = not is_new and (moved or pulse.has_stepped)
            self._seen[site] = (attempt, beat, waits)
            self.known[site] = replace(pulse, changed_at=ticks, state=beat.state, stood_since=since, has_stepped=steps)

    def _waits(self, beat: Beat) -> bool:
        """Whether an offer of this site is out in a round that nobody has closed."""
        for fragment, version in enumerate(beat.versions):
            offer, commit = keys.offer(fragment, version, beat.site), keys.commit(fragment, version)
            if offer in self._store.list(offer) and commit not in self._store.list(commit):
                return True
        return False


def hangs(pulse: Pulse, limits: Limits, ticks: float) -> str:
    """Why a running replica is taken for hanging: its beats stopped, or go on without a step; "": it isn't. One that
    ends waits for the others."""
    ends, changed_at = pulse.state in ENDING_STATES, pulse.changed_at
    beats = (pulse.running_since if changed_at is None else changed_at), changed_at is None or ends
    steps = (None if ends else pulse.stood_since), not pulse.has_stepped
    for (since, patient), limit_s, what, option in (
        (beats, limits.hang_after_s, "no beat", "--hang-after"),
        (steps, limits.stall_after_s, "no inner step", "launch.stall_after_s"),
    ):
        most_s = (limit_s or math.inf) * (STARTUP_PATIENCE if patient else 1)
        if since is not None and ticks - since >= most_s:
            return f"{what} for {ticks - since:.0f} s, and the limit is {most_s:.0f} s ({option})"
    return ""
