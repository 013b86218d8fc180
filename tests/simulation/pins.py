"""What garbage collection must leave: all that a site which beats and joins or trains has pinned (rule 13).

Judged by the beats as they stood in the bucket. A collector may look at them at any moment between its start and its
first deletion, so only sites that beat steadily over all of it count; pins never fall, so the highest written do.
"""

import json
import re
from dataclasses import dataclass, field
from itertools import zip_longest

GARBAGE = re.compile(r"(?:rounds/(\d{4})/(\d{8})/(offers|payload|merged)/[^/]+|masters/(\d{4})/(\d{8})-[0-9a-f]{16})")
"""All that may be deleted, in words of our own: never a commit, nor what tells who is in the run."""
MOST_SKEW = 1.5
"""How much faster than virtual time a process's clock may run."""
LATE_S = 5.0
"""A delete whose answer was lost may take effect so much later, when the next collection has begun."""


@dataclass
class _Pulse:
    at: float
    steady_since: float
    is_present: bool = True
    """False once it has said that it is done or leaves: a late request may put an older beat over that."""
    pins: list[int] = field(default_factory=list)


class Pins:
    """One world's claims and beats, by site and incarnation."""

    def __init__(self, liveness_s: float, max_stale_rounds: int) -> None:
        self._longest_s = liveness_s / MOST_SKEW
        self._max_stale_rounds = max_stale_rounds
        self._pulses: dict[str, dict[int, _Pulse]] = {}
        self._claimed: dict[str, int] = {}

    def claim(self, site: str, incarnation: int) -> None:
        """An incarnation of a name was claimed: what older ones pinned nobody needs, they stop."""
        self._claimed[site] = max(incarnation, self._claimed.get(site, incarnation))

    def beat(self, data: bytes, now: float) -> None:
        """A beat was written, maybe a late one."""
        beat = json.loads(data)
        known = self._pulses.setdefault(beat["site"], {})
        pulse = known.setdefault(beat["incarnation"], _Pulse(now, now))
        if now - pulse.at >= self._longest_s:
            pulse.steady_since = now
        pulse.at = now
        pulse.is_present &= beat["state"] in ("joining", "live")
        pulse.pins = [max(pair) for pair in zip_longest(beat["pins"], pulse.pins, fillvalue=0)]

    def fault(self, key: str, since: float, now: float) -> str | None:
        """Why a collection that began at `since` must not delete a key; None when it may."""
        match = GARBAGE.fullmatch(key)
        if match is None:
            return "is no garbage"
        fragment, version = int(match[1] or match[4]), int(match[2] or match[5])
        if match[3] == "payload":
            version += self._max_stale_rounds
        for site, pulses in self._pulses.items():
            pulse = pulses.get(self._claimed[site])
            if pulse is None:
                continue  # it has yet to say what it needs, and looks for that afterwards
            steady = pulse.steady_since <= since - LATE_S and now - pulse.at < self._longest_s
            if steady and pulse.is_present and version >= pulse.pins[fragment]:
                return f"is still pinned: {site} needs fragment {fragment} from version {pulse.pins[fragment]} on"
        return None
