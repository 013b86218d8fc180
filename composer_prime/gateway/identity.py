"""Who asks: the site whose admitted key signed the request, for this run, just now, and not twice.

Keys are those of the run's own admissions, read again every few seconds: who is revoked there is soon refused here.
"""

import threading
import time
from collections.abc import Callable, Mapping

from composer_prime.errors import SiteRevoked, StoreError
from composer_prime.gateway import wire
from composer_prime.gateway.rules import Refusal
from composer_prime.sync.roster import Roster
from composer_prime.sync.signatures import verify

REFRESH_S = 2.0
"""Seconds between two looks at the run's admissions: as long as a revoked key may still ask."""
_HEADERS = (wire.KEY_HEADER, wire.TIME_HEADER, wire.NONCE_HEADER, wire.BODY_HEADER, wire.SIGNATURE_HEADER)


class Identities:
    """The sites of one run, as a gateway knows them. Thread-safe."""

    def __init__(
        self,
        roster: Roster,
        run: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._roster = roster
        self._run = run
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._failure = ""
        self._seen: dict[str, float] = {}

    def site_of(self, method: str, target: str, headers: Mapping[str, str]) -> str:
        """The site that made a request. Raises Refusal; StoreError when the admissions can't be read now."""
        if missing := [name for name in _HEADERS if not headers.get(name)]:
            raise Refusal("unknown", f"the request isn't signed, it has no {missing[0]}: use a gateway+ store")
        public, time_s, nonce, body, signature = (headers[name] for name in _HEADERS)
        site = self._admitted(public)
        self._check_time(time_s)
        signed = wire.message(method, self._run, target, body, time_s, nonce)
        if not verify(public, signed, signature):
            raise Refusal("unknown", f"the signature isn't one of {public} over this request to run {self._run}")
        return site

    def check_once(self, signature: str) -> None:
        """Raise Refusal when a write's signature was seen before. Another gateway may see it again: then what it writes
        is checked as ever."""
        now = self._clock()
        with self._lock:
            for old, at in list(self._seen.items()):  # in the order they came
                if now - at <= 2 * wire.CLOCK_WINDOW_S:
                    break
                del self._seen[old]
            if signature in self._seen:
                raise Refusal("replayed", "this request was sent before: sign each one anew")
            self._seen[signature] = now

    def _admitted(self, public: str) -> str:
        """The one site with this key; a site that may close rounds isn't let in, since the others would wait for it."""
        with self._lock:
            self._refresh()
            sites = sorted(site for site, key in self._roster.admitted().items() if key == public)
            held_by = self._roster.held_by(public)
            closers = [site for site in sites if site not in self._roster.guests()]
        if not sites and held_by is not None:
            raise Refusal(wire.REVOKED, str(SiteRevoked.of(held_by)))
        why = None
        if not sites:
            why = f"run {self._run} admits no site with the key {public[:64]}: ask its owner to admit it"
        elif len(sites) > 1:
            why = f"sites {' and '.join(sites)} have the same key: the run's owner must give each its own"
        elif closers:
            why = (
                f"site {sites[0]} may close rounds, and behind a gateway nobody does: the run's owner must admit it as "
                f"a guest (composer-prime admit STORE --site {sites[0]} --public {public} --guest)"
            )
        if why is not None:
            raise Refusal(wire.NOT_ADMITTED, why, status=403 if len(sites) == 1 else 401)
        return sites[0]

    def _refresh(self) -> None:
        """Look at the admissions again, now and then. Raises StoreError: who can't be looked up isn't let in.

        Those who waited for a look that failed don't each try on their own.
        """
        if self._clock() - self._looked_at < REFRESH_S:
            if self._failure:
                raise StoreError(self._failure)
            return
        try:
            self._roster.refresh()
            self._failure = ""
        except StoreError as error:
            self._failure = str(error)
            raise
        finally:
            self._looked_at = self._clock()

    def _check_time(self, time_s: str) -> None:
        if not time_s.isascii() or not time_s.isdigit() or len(time_s) > 12:
            raise Refusal("malformed", f"{wire.TIME_HEADER} ({time_s[:32]!r}) must be whole seconds since 1970")
        ahead = int(time_s) - self._wall()
        if abs(ahead) > wire.CLOCK_WINDOW_S:
            way = "ahead of" if ahead > 0 else "behind"
            raise Refusal(
                "unknown",
                f"the request's time is {abs(ahead):.0f} s {way} the gateway's clock, at most {wire.CLOCK_WINDOW_S} s "
                "are allowed: set this machine's clock (NTP); a request that was kept can't be sent again",
            )
