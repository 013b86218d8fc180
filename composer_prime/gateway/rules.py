"""The rules by which a gateway answers: those for members judge names and sizes, then what the bucket and bytes say.

Members are the sites that come through a gateway: none of them may close rounds (`identity`).
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from composer_prime.errors import KeyMissing
from composer_prime.gateway import contents, policy
from composer_prime.gateway.invitations import Invitations
from composer_prime.gateway.policy import Operation, RunFacts
from composer_prime.gateway.refusal import busy, not_admitted
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.store.keys import Place
from composer_prime.sync.reading import read_bytes
from composer_prime.sync.records import Offer
from composer_prime.sync.roster import Roster

SOUND_KEPT = 10_000
"""Payloads that are remembered as sound, and as unsound: nobody behind a gateway can change one."""
UNSOUND_S = 60.0
"""How long a payload counts as unsound before it is read again: its owner may have mended the bucket."""
PROMISED_S = 600.0
"""How long a payload that was let in counts although it isn't there: a ticket lasts shorter, an upload by it longer."""


class Rules(Protocol):
    """What a gateway asks before it acts. Thread-safe; methods that look at the bucket raise StoreError."""

    def read_refusal(self, key: str) -> str | None:
        """Why `key` may not be read, nor be listed."""
        ...

    def write_refusal(self, site: str, operation: Operation, key: str, nbytes: int) -> str | None:
        """Why `site` may not write so many bytes there, whatever they are. Raises Refusal when it may write nothing."""
        ...

    def content_fault(self, site: str, key: str, data: bytes) -> str | None:
        """Why these bytes may not stand there. Raises Refusal when that can't be judged now."""
        ...

    def is_bulk(self, key: str) -> bool:
        """Whether the bytes go by ticket, where the bucket knows such."""
        ...

    def is_written_once(self, key: str) -> bool:
        """Whether a put may not overwrite."""
        ...


class MemberRules:
    """For the sites of one run that may not close its rounds: see `policy`."""

    def __init__(
        self,
        store: Store,
        facts: RunFacts,
        roster: Roster,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._facts = facts
        self._roster = roster
        self._invitations = Invitations(store, roster, wall=wall)
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}
        """By fragment: the highest round that was seen to be open or closed."""
        self._sound: dict[tuple[str, int], None] = {}
        self._unsound: dict[tuple[str, int], tuple[float, str]] = {}
        """By payload and size: until when it counts as unsound, and why; in the order they were read."""
        self._read_now: set[str] = set()
        self._promised: dict[tuple[str, int, int], dict[str, float]] = {}
        """By site, fragment and round: until when a payload that was let in counts; those let in last at the end."""

    def read_refusal(self, key: str) -> str | None:
        return policy.read_refusal(key)

    def write_refusal(self, site: str, operation: Operation, key: str, nbytes: int) -> str | None:
        refusal = policy.write_refusal(site, operation, key, nbytes, self._facts)
        if refusal is None and (too_late := self._invitations.refusal(site)):
            raise not_admitted(403, too_late)
        place = keys.place(key)
        if refusal is not None or place is None or place.kind not in ("offer", "payload"):
            return refusal
        if not self._has_come(place.fragment, place.number):
            return f"{key} is of a round that hasn't come: the one before has no commit"
        if place.kind == "offer":
            return None
        kept = self._facts.terms.max_stale_rounds
        if self._has_come(place.fragment, place.number + kept + 1):
            return f"{key} is of a round that is over: payloads count for {kept} rounds more"
        return self._room_refusal(key, place)

    def content_fault(self, site: str, key: str, data: bytes) -> str | None:
        place = keys.place(key)
        assert place is not None and place.site == site  # as `write_refusal` has found
        if place.kind == "offer":
            offer = contents.parse_offer(key, place, data, self._facts, self._roster)
            return offer if isinstance(offer, str) else self._payload_fault(key, offer)
        if place.kind == "claim":
            return contents.claim_fault(key, place, data, self._roster)
        if place.kind == "beat":
            return contents.beat_fault(key, place, data, self._standing(key), self._facts, self._roster)
        if place.kind == "tape":
            return contents.tape_fault(key, place, data)
        return contents.payload_fault(
            key, place, len(data), lambda start, length: data[start : start + length], self._facts
        )

    def is_bulk(self, key: str) -> bool:
        return policy.is_bulk(key)

    def is_written_once(self, key: str) -> bool:
        return policy.is_written_once(key)

    def _has_come(self, fragment: int, version: int) -> bool:
        """Whether that round is open or closed: the one before has a commit."""
        if version <= self._open.get(fragment, 0):
            return True
        try:
            self._store.get_range(keys.commit(fragment, version - 1), 0, 1)
        except KeyMissing:
            return False
        with self._lock:
            self._open[fragment] = max(version, self._open.get(fragment, 0))
        return True

    def _room_refusal(self, key: str, place: Place) -> str | None:
        prefix = keys.payloads_prefix(place.fragment, place.number, place.site)
        stored = {name for name in self._store.list(prefix) if _site(name) == place.site}
        round_, now = (place.site, place.fragment, place.number), self._clock()
        with self._lock:
            promised = {name: until for name, until in self._promised.pop(round_, {}).items() if now < until}
            counted = stored | promised.keys()
            has_room = key in counted or len(counted) < policy.PAYLOADS_A_ROUND
            if has_room:
                promised[key] = now + PROMISED_S
            if promised:
                self._promised[round_] = promised
            while self._promised and max(next(iter(self._promised.values())).values()) <= now:
                del self._promised[next(iter(self._promised))]
        if has_room:
            return None
        return f"{key} is one payload too many: a site stores at most {policy.PAYLOADS_A_ROUND} for one round"

    def _standing(self, key: str) -> bytes | None:
        try:
            return read_bytes(self._store, key)
        except KeyMissing:
            return None

    def _payload_fault(self, key: str, offer: Offer) -> str | None:
        """Why the payload that an offer names isn't there, whole, with the hash in its name; None when it is."""
        payload = offer.payload
        if payload is None or (payload, offer.nbytes) in self._sound:
            return None
        with self._lock:
            until, fault = self._unsound.get((payload, offer.nbytes), (0.0, None))
            if fault is not None and self._clock() < until:
                return fault
            if payload in self._read_now:
                raise busy(f"{payload} is being looked at for another request", 1)
            self._read_now.add(payload)
        try:
            fault = self._read_fault(key, payload, offer.nbytes)
        finally:
            with self._lock:
                self._read_now.remove(payload)
        return fault

    def _read_fault(self, key: str, payload: str, nbytes: int) -> str | None:
        """As `_payload_fault`, from the bucket; what was read is remembered."""
        place = keys.place(payload)
        assert place is not None  # `parse_offer` has looked
        try:
            last = self._store.get_range(payload, nbytes - 1, 2)
        except KeyMissing:
            return f"{key} names {payload}, which isn't there: payloads come before the offers that name them"
        if len(last) != 1:
            return f"{key} says that {payload} has {nbytes} bytes, it has {'more' if last else 'fewer'}"
        fault = contents.payload_fault(
            payload,
            place,
            nbytes,
            lambda start, length: self._store.get_range(payload, start, length),
            self._facts,
        )
        with self._lock:
            if fault is None:
                self._sound[payload, nbytes] = None
            else:
                self._unsound.pop((payload, nbytes), None)
                self._unsound[payload, nbytes] = self._clock() + UNSOUND_S, fault
            _forget_oldest(self._sound)
            _forget_oldest(self._unsound)
        return fault


def _forget_oldest(kept: dict[Any, Any]) -> None:
    while len(kept) > SOUND_KEPT:
        del kept[next(iter(kept))]


def _site(key: str) -> str:
    place = keys.place(key)
    return "" if place is None else place.site
