"""What members may do: by names and sizes (`write_refusal`, pure), by their invitation, by which rounds stand.

Members are the sites that come through a gateway: none of them may close rounds (`identity`). A member reads the run.
It writes its own offers, payloads, claims and tape, each once, and its own beat; it deletes nothing, and it neither
commits nor reduces: those records decide for everybody, and stay with the owner's sites.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from composer_prime.errors import KeyMissing
from composer_prime.gateway import invitation_keys
from composer_prime.gateway.wire import INLINE_BYTES, MISSING, NOT_ADMITTED, REVOKED
from composer_prime.store import keys
from composer_prime.store.base import Store, is_key
from composer_prime.store.keys import Place
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Claim, Invited
from composer_prime.sync.roster import Roster
from composer_prime.sync.terms import Terms

Operation = Literal["read", "create", "put", "delete"]

HIDDEN = {"probe"}
"""Kinds that aren't read either. Tapes are: they hold counts, names and reasons, no text of prompts or rollouts."""
BULK = {"payload", "merged payload", "master"}
"""Kinds whose bytes go between site and bucket, by ticket; the others are records, which come through the gateway."""
WRITTEN: Mapping[str, tuple[frozenset[str], int]] = {
    "offer": (frozenset({"create"}), INLINE_BYTES),
    "claim": (frozenset({"create"}), 2**12),
    "tape": (frozenset({"create"}), INLINE_BYTES),
    "beat": (frozenset({"put"}), 2**16),
    "payload": (frozenset({"create", "put"}), 0),
}
"""Kinds that a member writes: how, and at most how many bytes; a payload's size is its fragment's."""
PAYLOADS_A_ROUND = 4
"""Payloads that one site may store for one round of one fragment. One is due; restarts may bring others."""


STATUS = {
    "malformed": 400, "unknown": 401, "replayed": 401, NOT_ADMITTED: 401, REVOKED: 401, "forbidden": 403, MISSING: 404,
    "run": 404, "method": 405, "length": 411, "large": 413, "busy": 429, "bucket": 502,
}  # fmt: skip


class Refusal(Exception):
    """Ends the handling of one request: an HTTP status, a word for programs, a line for people."""

    def __init__(self, code: str, text: str, *, status: int = 0, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.status = status or STATUS[code]
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class RunFacts:
    """What there is to know of a run from its manifest, and the most bytes that an object may have."""

    run: str
    terms: Terms
    bounds: tuple[tuple[int, int], ...]
    """By fragment: the least and the most bytes of a payload."""
    max_object_bytes: int


def read_refusal(key: str) -> str | None:
    """Why a member may not read what stands at `key`; None when it may."""
    place = keys.place(key) if is_key(key) else None
    if place is None or place.kind in HIDDEN:
        return f"{key[:80]!r} names nothing that a member of a run reads"
    return None


def write_refusal(site: str, operation: Operation, key: str, nbytes: int, facts: RunFacts) -> str | None:
    """Why `site` may not write (or delete) so many bytes at `key`; None when it may."""
    place = keys.place(key) if is_key(key) else None
    if place is None:
        return f"{key[:80]!r} is no key of an object of a run: spell keys as composer_prime.store.keys does"
    if operation == "delete":
        return f"{key}: a member behind a gateway deletes nothing"
    if place.kind not in WRITTEN:
        return f"{key} is a {place.kind}: a member behind a gateway writes its own offers, payloads, claims, tape, beat"
    if place.site != site:
        return f"{key} is site {place.site}'s: this key is site {site}'s, which writes under its own name only"
    operations, most = WRITTEN[place.kind]
    if operation not in operations:
        how = "written once: create it" if operations == {"create"} else "overwritten: put it"
        return f"{key} is a {place.kind}, which is {how}"
    if place.kind in ("offer", "payload") and place.fragment >= len(facts.bounds):
        return f"{key} is of fragment {place.fragment}, run {facts.run} has {len(facts.bounds)}"
    if place.kind == "payload":
        return _payload_refusal(key, nbytes, facts.bounds[place.fragment], facts)
    if nbytes > most:
        return f"{key} has {nbytes} bytes, a {place.kind} at most {most}"
    return None


def _payload_refusal(key: str, nbytes: int, bounds: tuple[int, int], facts: RunFacts) -> str | None:
    least, most = bounds
    if not least <= nbytes <= most:
        return f"{key} has {nbytes} bytes, {facts.terms.codec} of this fragment has {least} to {most}"
    if nbytes > facts.max_object_bytes:
        return f"{key} has {nbytes} bytes, this gateway takes at most {facts.max_object_bytes} (--max-object-mib)"
    return None


def is_bulk(key: str) -> bool:
    """Whether the bytes at `key` go between site and bucket."""
    place = keys.place(key)
    return place is not None and place.kind in BULK


def is_written_once(key: str) -> bool:
    """Whether nothing may be overwritten at `key`."""
    place = keys.place(key)
    return place is None or place.kind != "beat"


class MemberRules:
    """For the members of one run. Thread-safe; methods that look at the bucket raise StoreError."""

    def __init__(self, store: Store, facts: RunFacts, roster: Roster) -> None:
        self._store = store
        self._facts = facts
        self._invitations = Invitations(store, roster)
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}
        """By fragment: the highest round that was seen to be open or closed."""
        self._let_in: dict[tuple[int, int], dict[str, set[str]]] = {}
        """By fragment and round, by site: payloads that were let in, there or not; a ticket may be used later."""

    def write_refusal(self, site: str, operation: Operation, key: str, nbytes: int) -> str | None:
        """Why `site` may not write so many bytes there. Raises Refusal when it may write nothing."""
        refusal = write_refusal(site, operation, key, nbytes, self._facts)
        if refusal is None and (too_late := self._invitations.refusal(site)):
            raise Refusal(NOT_ADMITTED, too_late, status=403)
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
            over = self._open[fragment] - self._facts.terms.max_stale_rounds
            for place in [place for place in self._let_in if place[0] == fragment and place[1] < over]:
                del self._let_in[place]
        return True

    def _room_refusal(self, key: str, place: Place) -> str | None:
        prefix = keys.payloads_prefix(place.fragment, place.number, place.site)
        listed = ((name, keys.place(name)) for name in self._store.list(prefix))
        stored = {name for name, found in listed if found is not None and found.site == place.site}
        with self._lock:
            let_in = self._let_in.setdefault((place.fragment, place.number), {}).setdefault(place.site, set())
            if key not in stored | let_in and len(stored | let_in) >= PAYLOADS_A_ROUND:
                return f"{key} is one payload too many: a site stores at most {PAYLOADS_A_ROUND} for one round"
            let_in.add(key)
        return None


class Invitations:
    """Until when an invited site may first come in, by the gateway's own clock: a volunteer's may be set as it likes.

    A site that came in time stays, and may start again. One that was admitted without an invitation has no such date.
    Thread-safe; looks at the bucket until a site has come, and never again.
    """

    def __init__(self, store: Store, roster: Roster, *, wall: Callable[[], float] = time.time) -> None:
        self._store = store
        self._roster = roster
        self._wall = wall
        self._lock = threading.Lock()
        self._came: dict[str, str] = {}
        """By site: the key with which it has claimed its name."""

    def refusal(self, site: str) -> str | None:
        """Why `site` came too late to write anything; None when it is in, or may come in. Raises StoreError."""
        public = self._roster.admitted().get(site)
        if public is None or self._came.get(site) == public:
            return None
        if self._has_come(site):
            with self._lock:
                self._came[site] = public
            return None
        invited = self._newest(site)
        if invited is None or invited.public != public or self._wall() < invited.expires_at:
            return None
        until = datetime.fromtimestamp(invited.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return (
            f"the invitation of site {site} expired at {until} by the gateway's clock, and the site had not come "
            "until then: ask the run's owner for another one"
        )

    def _has_come(self, site: str) -> bool:
        """Whether a claim stands that the site's key signed: an earlier invitation of the name had another key."""
        for key in sorted(self._store.list(keys.site_prefix(site)), reverse=True):
            claim = find_record(self._store, Claim, key) if keys.is_claim(key) else None
            if claim is not None and claim.site == site and self._roster.fault(claim, site) is None:
                return True
        return False

    def _newest(self, site: str) -> Invited | None:
        """The owner's last record for that name."""
        for key in sorted(self._store.list(invitation_keys.invitations_of(site)), reverse=True):
            record = find_record(self._store, Invited, key) if invitation_keys.is_invitation(key) else None
            if record is not None and record.site == site and self._roster.owner_fault(record) is None:
                return record
        return None
