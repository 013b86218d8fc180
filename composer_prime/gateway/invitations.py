"""Until when an invited site may first come in, by the gateway's own clock: a volunteer's may be set as it likes.

A site that came in time stays, and may start again. One that was admitted without an invitation has no such date.
"""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from composer_prime.gateway import invitation_keys
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Claim, Invited
from composer_prime.sync.roster import Roster


class Invitations:
    """The invitations of one run. Thread-safe; looks at the bucket until a site has come, and never again."""

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
