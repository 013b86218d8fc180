"""What members may do, by names and sizes (`policy`), by their invitation, and by which rounds the bucket shows.

Members are the sites that come through a gateway: none of them may close rounds (`identity`).
"""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from composer_prime.errors import KeyMissing
from composer_prime.gateway import invitation_keys, policy
from composer_prime.gateway.policy import Operation, Refusal, RunFacts
from composer_prime.gateway.wire import NOT_ADMITTED
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.store.keys import Place
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Claim, Invited
from composer_prime.sync.roster import Roster


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
        refusal = policy.write_refusal(site, operation, key, nbytes, self._facts)
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
            if key not in stored | let_in and len(stored | let_in) >= policy.PAYLOADS_A_ROUND:
                return f"{key} is one payload too many: a site stores at most {policy.PAYLOADS_A_ROUND} for one round"
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
