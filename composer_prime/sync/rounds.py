"""Closing rounds: reads the offers of an open round, judges them as a committer must, and creates the commit (rule 5).

Decisions are `protocol`'s, checks of records `validity`'s; here is the reading, and what this site has seen when.
"""

import logging
from collections import Counter
from collections.abc import Mapping

from composer_prime.errors import CorruptObject, KeyMissing
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import MAX_RECORD_BYTES
from composer_prime.sync.errands import OpenRound
from composer_prime.sync.members import Members
from composer_prime.sync.protocol import (
    STAGGER_S,
    RoundDecision,
    RoundView,
    Verdict,
    adaptive_grace,
    commit_rank,
    decide_round,
    num_parts,
)
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Offer
from composer_prime.sync.replica import Replica, Round
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.validity import copies, offer_fault, write_commit

logger = logging.getLogger(__name__)

MAX_REFUSED = 100
"""Refused offers that a commit names: anybody may write some, and nothing depends on them."""
TAKEN_BYTES = 64
"""What a commit says besides of an offer that it takes, at most."""
SPARED_BYTES = 2**19
"""Of a commit's record, for what isn't the offers taken."""


class RoundCloser:
    """What one site has seen of the open rounds, and the commits it creates."""

    def __init__(
        self,
        store: Store,
        run: Run,
        *,
        runtime: Runtime,
        roster: Roster,
        members: Members,
        site: str,
        incarnation: int,
    ) -> None:
        self._store = store
        self._run = run
        self._terms = run.terms
        self._runtime = runtime
        self._roster = roster
        self._members = members
        self._site = site
        self._incarnation = incarnation
        self._rounds: dict[int, OpenRound] = {}
        self._judged_by = roster.newest
        self._intervals: list[float] = []
        self._closed_at: float | None = None

    def note_closed(self, closed: Round, took_part: bool) -> None:
        """A round is over: forget what was seen of it, and learn how long one takes."""
        self._rounds.pop(closed.fragment, None)
        now = self._runtime.now()
        if took_part:
            if self._closed_at is not None:
                self._intervals.append(now - self._closed_at)
                del self._intervals[:-64]
            self._closed_at = now

    @property
    def grace_s(self) -> float:
        """How long this site waits, just now, for sites that are late."""
        return adaptive_grace(self._intervals, self._terms)

    @property
    def is_gathering(self) -> bool:
        """Whether another site's offer stands in a round of ours: the rest, and a commit, are likely to come soon."""
        return any(current.verdicts.keys() - {self._site} for current in list(self._rounds.values()))

    def serve(self, replica: Replica) -> bool:
        """Look at a fragment's open round, and create its commit when the rules and this site's rank allow it.

        Returns whether a commit was created by this site.
        """
        current = self._look(replica)
        now = self._runtime.now()
        live = self._members.live(now) | {self._site}
        if self._expects_gather(current, live, replica):
            self._check_payloads(current, replica, current.offers)
        guests = self._roster.guests()
        if self._site in guests or not self._decide(current, live, now).close:
            current.closable_at = None
            return False
        if current.closable_at is None:
            current.closable_at = now
        rank = commit_rank(self._site, (live & current.verdicts.keys()) - guests, *_place(replica))
        if now - current.closable_at < rank * STAGGER_S:
            return False
        self._members.notice_newcomers()  # a site that joined a moment ago is waited for
        decision = self._decide(current, self._members.live(now) | {self._site}, now)
        if not decision.close:
            current.closable_at = None
            return False
        return self._commit(current, replica, decision.take)

    def _look(self, replica: Replica) -> OpenRound:
        """The open round with every offer that stands there now."""
        if self._roster.newest != self._judged_by:  # other keys are admitted than before: every offer is judged anew
            self._judged_by = self._roster.newest
            self._rounds.clear()
        current = self._rounds.get(replica.fragment)
        if current is None or current.version != replica.version:
            current = self._rounds[replica.fragment] = OpenRound(replica.version)
        self._read_offers(current, replica)
        return current

    def _decide(self, current: OpenRound, live: frozenset[str], now: float) -> RoundDecision:
        num_valid = sum(verdict == "valid" for verdict in current.verdicts.values())
        if current.quorum_at is None and num_valid >= self._terms.quorum:
            current.quorum_at = now
        if current.all_at is None and live <= current.verdicts.keys():
            current.all_at = now
        num_sound = sum(verdict != "invalid" for verdict in current.verdicts.values())
        if current.sound_at is None and num_sound >= self._terms.quorum:
            current.sound_at = now
        view = RoundView(
            current.verdicts,
            live,
            None if current.quorum_at is None else now - current.quorum_at,
            None if current.all_at is None else now - current.all_at,
            None if current.sound_at is None else now - current.sound_at,
        )
        return decide_round(view, self._terms.quorum, self.grace_s)

    # --- reading offers ---------------------------------------------------------------------------------------------

    def _read_offers(self, current: OpenRound, replica: Replica) -> None:
        listed = self._store.list(keys.offers_prefix(replica.fragment, current.version))
        new = [key for key in listed if keys.is_offer(key) and keys.offer_site(key) not in current.verdicts]
        for key, found in zip(new, self._runtime.map(self._read_offer, new), strict=True):
            site = keys.offer_site(key)
            fault = found if isinstance(found, str) else self._fault(found, site, replica)
            if isinstance(found, Offer) and (base := self._base_of(found, site, replica)) is not None:
                current.bases[site] = base
            if isinstance(found, str) or fault is not None:
                current.refuse(site, fault or "unreadable")
                why = current.faults[site]
                logger.warning("offer_refused fragment=%d site=%s why=%s", replica.fragment, site, why)
                continue
            if (newer := self._members.incarnation(site)) > found.incarnation:
                current.set_aside(site, f"was made by incarnation {found.incarnation}, {newer} has taken over")
                continue
            current.verdicts[site] = _worth(found, is_guest=site in self._roster.guests())
            if found.payload is not None:
                current.offers[site] = found
        for site, why in copies(self._by_standing(current.offers, replica)).items():
            current.refuse(site, why)
            logger.warning("offer_refused fragment=%d site=%s why=%s", replica.fragment, site, why)

    def _by_standing(self, offers: Mapping[str, Offer], replica: Replica) -> dict[str, Offer]:
        """Offers in the order in which they are believed to be their site's own work, should two be equal.

        One's own first, then those of sites that the last rounds took oftener: who copies has made less of that. Of
        equals the one that was seen first; names decide nothing, since who copies may choose one.
        """
        taken = Counter(keys.parse_payload(payload)[2] for payload in replica.history.taken)
        return dict(sorted(offers.items(), key=lambda item: (item[0] != self._site, -taken[item[0]])))

    def _read_offer(self, key: str) -> Offer | str:
        try:
            return read_record(self._store, Offer, key)
        except (CorruptObject, KeyMissing) as error:
            return str(error)

    def _base_of(self, offer: Offer, site: str, replica: Replica) -> str | None:
        """The master that an offer vouches for; None where it is a guest's, or isn't its site's for this round."""
        if site in self._roster.guests():
            return None
        is_own = offer.is_at(site, *_place(replica)) and self._roster.fault(offer, site) is None
        return offer.base_sha if is_own else None

    def _fault(self, offer: Offer, site: str, replica: Replica) -> str | None:
        fault = self._roster.fault(offer, site)
        if fault is not None:
            return fault
        return offer_fault(
            offer,
            site=site,
            facts=replica.coding.facts,
            version=replica.version,
            base_sha=replica.master.sha256,
            taken=replica.history.taken,
            terms=self._terms,
        )

    def _expects_gather(self, current: OpenRound, live: frozenset[str], replica: Replica) -> bool:
        """Whether everyone will read everyone's payload, so that reading them early pays."""
        most = max(len(live), len(current.offers))
        return num_parts(most, replica.coding.plan.num_slices, self._terms) == 0

    def _check_payloads(self, current: OpenRound, replica: Replica, offers: Mapping[str, Offer]) -> bool:
        """Read and decode payloads that weren't yet; False when one of them turned out unsound."""
        new = [site for site in offers if site not in current.checked]

        def check(site: str) -> str | None:
            try:
                replica.merger.fetch(offers[site])
            except (CorruptObject, KeyMissing) as error:
                return str(error)
            return None

        faults = dict(zip(new, self._runtime.map(check, new), strict=True))
        for site, fault in faults.items():
            current.checked.add(site)
            if fault is not None:
                current.refuse(site, fault)
                logger.warning("offer_refused fragment=%d site=%s why=%s", replica.fragment, site, fault)
        return not any(faults.values())

    # --- the commit -------------------------------------------------------------------------------------------------

    def _commit(self, current: OpenRound, replica: Replica, sites: tuple[str, ...]) -> bool:
        """Create the commit; losing the race is as good."""
        take = self._fitting(current, replica, sites)
        gathered = num_parts(len(take), replica.coding.plan.num_slices, self._terms) == 0
        if gathered and not self._check_payloads(current, replica, take):
            return False  # fewer are left: decide again
        if replica.look() is not None:
            return False
        replica.check_agrees([base for site, base in current.bases.items() if site != self._site])
        admissions, admission_sha = self._roster.honoured
        if self._roster.newest != self._judged_by:
            return False  # another thread has read newer ones: an offer that it takes may be of who is revoked
        record = write_commit(
            facts=replica.coding.facts,
            version=current.version,
            base_sha=replica.master.sha256,
            previous=replica.previous,
            take=take,
            refused=dict(list(current.faults.items())[:MAX_REFUSED]),
            voids=replica.history.voids,
            terms=self._terms,
            guests=self._roster.guests(admissions),
            admissions=admissions,
            admission_sha=admission_sha,
            committer=self._site,
            incarnation=self._incarnation,
        )
        data = self._roster.sign(record).to_bytes()
        return self._store.create(keys.commit(replica.fragment, current.version), data)

    def _fitting(self, current: OpenRound, replica: Replica, sites: tuple[str, ...]) -> dict[str, Offer]:
        """The offers that one record has room for, members' first, then as drawn per round."""

        def order(site: str) -> tuple[bool, int]:
            return current.verdicts[site] != "valid", commit_rank(site, sites, *_place(replica))

        left, take = MAX_RECORD_BYTES - SPARED_BYTES, {}
        for site in sorted(sites, key=order):
            left -= len(current.offers[site].to_bytes()) + TAKEN_BYTES
            if left >= 0:
                take[site] = current.offers[site]
        return take


def _worth(offer: Offer, *, is_guest: bool) -> Verdict:
    if offer.payload is None:
        return "empty"
    return "guest" if is_guest else "valid"


def _place(replica: Replica) -> tuple[int, int]:
    return replica.fragment, replica.version
