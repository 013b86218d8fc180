"""Rules 11 and 12: where a site stands when it comes into a run, for the first time or back from a crash.

A checkpoint may be older than the last offer its site made; the bucket knows better. Nothing is counted twice: movement
that a commit took is left out, movement that is still out or was passed over is carried.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing, StoreError
from composer_prime.outer.merge import carry, settle
from composer_prime.outer.sparse import dense
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.errands import Errand
from composer_prime.sync.history import find_commit, voids_among
from composer_prime.sync.journal import Journal
from composer_prime.sync.ledger import FragmentLedger
from composer_prime.sync.parameters import Parameters
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Offer, Taken
from composer_prime.sync.replica import Replica
from composer_prime.sync.roster import Roster
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.terms import Terms

logger = logging.getLogger(__name__)


@dataclass
class FragmentStand:
    """Where a site stands with one fragment. Owned and mutated by the site's `OuterLoop`.

    version    of the master the site adopted
    base       fp32, 1-D: that master's weights, rounded to the parameters' dtype; local minus base is own movement
    captured   fp32, 1-D: local values behind the capture that is out, shifted along when the base moves; None: none out
    residual   fp32, 1-D: what coding took from the last merged offer; None: nothing
    """

    version: int
    base: Tensor
    captured: Tensor | None = None
    residual: Tensor | None = None
    ledger: FragmentLedger = field(default_factory=FragmentLedger)

    def to_dict(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {
            "version": self.version,
            "base": self.base,
            "captured": self.captured,
            "residual": self.residual,
            "ledger": self.ledger.to_dict(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "FragmentStand":
        """What `to_dict` gave."""
        ledger = FragmentLedger(**state["ledger"])
        return cls(state["version"], state["base"], state["captured"], state["residual"], ledger)


@dataclass(frozen=True)
class Learned:
    """What a learner has done; empty for a site that stands on masters.

    starts   its local values as it came, by fragment: fp32 [n]
    tokens   of each inner step since
    """

    starts: Sequence[Tensor] = ()
    tokens: Sequence[int] = ()


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds of the outer loop.

    run         sha256 of the run's manifest; None: there is no checkpoint
    step        inner steps by then
    fragments   where the site stood with each fragment, as `FragmentStand.to_dict` gives it; none: it never did
    """

    run: str | None = None
    step: int = 0
    fragments: Sequence[Mapping[str, Any]] = ()
    learned: Learned = Learned()

    def stands(self) -> list[FragmentStand]:
        """Where it stood, for whoever mutates it."""
        return [FragmentStand.from_dict(one) for one in self.fragments]

    def check(self, num_fragments: int) -> None:
        """Raise CorruptObject unless it is of so many fragments, or of none."""
        saved = len(self.fragments or self.learned.starts)
        if saved not in (0, num_fragments):
            raise CorruptObject(f"the checkpoint holds {saved} fragments, the run has {num_fragments}")

    def to_dict(self) -> dict[str, Any]:
        """As it is stored."""
        return vars(self) | {"learned": dict(vars(self.learned))}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "Saved":
        """What `to_dict` gave."""
        return cls(state["run"], int(state["step"]), state["fragments"], Learned(**state["learned"]))


@dataclass(frozen=True)
class OwnPast:
    """What the bucket tells of this site's name since its checkpoint.

    newest    the newest offer record with a payload, or None
    taken     whether a commit took that one
    open      whether its round is still open
    merged    all that commits took of this name since, oldest first
    """

    newest: Offer | None
    taken: bool
    open: bool
    merged: tuple[Taken, ...]


def own_past(
    store: Store, runtime: Runtime, roster: Roster, terms: Terms, replica: Replica, site: str, since: int
) -> OwnPast:
    """Read this site's offers and every commit from round `since` to the open one."""
    fragment, now = replica.fragment, replica.version
    versions = range(since, now + 1)
    offers = runtime.map(lambda version: find_record(store, Offer, keys.offer(fragment, version, site)), versions)
    commits = runtime.map(lambda version: find_commit(store, roster, fragment, version), range(since, now))
    voids = voids_among(range(since, now), commits, replica.history.voids)
    merged: list[Taken] = []
    for version, commit in zip(range(since, now), commits, strict=True):
        if commit is not None and version not in voids:
            merged += [entry for entry in commit.taken if entry.site == site]
    own = [
        (version, offer)
        for version, offer in zip(versions, offers, strict=True)
        if offer is not None and offer.payload is not None and roster.fault(offer, site) is None
        if offer.is_at(site, fragment, version)
    ]
    if not own:
        return OwnPast(None, False, False, tuple(merged))
    version, newest = own[-1]
    return OwnPast(newest, newest.payload in {entry.payload for entry in merged}, version == now, tuple(merged))


class Returning:
    """Puts a site's fragments on the newest masters, with whatever own movement is not merged yet."""

    def __init__(
        self,
        store: Store,
        *,
        runtime: Runtime,
        roster: Roster,
        terms: Terms,
        params: Parameters,
        journal: Journal | None,
        site: str,
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._roster = roster
        self._terms = terms
        self._params = params
        self._journal = journal
        self._site = site

    def stand(
        self, replica: Replica, saved: FragmentStand | None, start: Tensor | None = None
    ) -> tuple[FragmentStand, Errand | None]:
        """Put one fragment's parameters on the replica's master.

        saved     from the checkpoint whose values the parameters hold; None when there is none: they count for nothing
        start     a learner's local values as it came; what it has moved since is carried, whatever becomes of the rest

        Returns where the site stands, and its offer that is still out in the open round, to be followed to its end.
        Raises StoreError when the log goes on and can't be read now as far as the checkpoint stands.
        """
        fragment, master = replica.coding.fragment, replica.master
        if saved is not None and replica.closing is not None and master.version < saved.version:
            raise StoreError(
                f"fragment {fragment.index}: this site's checkpoint stands on version {saved.version}, and the log can "
                f"be read up to {master.version} only now: start it again when what that round lacks is restored"
            )
        since = max(0, master.version - self._terms.max_stale_rounds) if saved is None else saved.version
        past = own_past(self._store, self._runtime, self._roster, self._terms, replica, self._site, since)
        base = self._params.rounded(fragment, master.weights)
        stand = FragmentStand(master.version, base)
        if saved is not None:
            stand.residual, stand.ledger = saved.residual, saved.ledger
        now = None if saved is None and start is None else self._params.read(fragment)
        local = self._local(stand, saved, past, replica, now if start is None else start)
        if start is not None and now is not None:
            local = carry(now, start, base if local is None else local)
        self._params.write(fragment, master.weights if local is None else local)
        if not past.open or past.newest is None or stand.captured is None:
            return stand, None
        return stand, Errand.of_offer(past.newest, self._residual_after(past.newest.payload))

    def _local(
        self, stand: FragmentStand, saved: FragmentStand | None, past: OwnPast, replica: Replica, local: Tensor | None
    ) -> Tensor | None:
        """The local values on the new base, from those that the checkpoint left; None: the master's own."""
        newest = past.newest
        if newest is not None and not _is_saved_capture(newest.trained_tokens, saved):
            if past.taken:
                self._restore(stand, saved, past, newest, carried=False)
                return None
            continued = self._continue_offer(stand, saved, past, newest, replica)
            if continued is not None:
                return continued
        if saved is None or local is None:
            return None
        return self._continue_saved(stand, saved, past, local)

    def _restore(
        self, stand: FragmentStand, saved: FragmentStand | None, past: OwnPast, newest: Offer, *, carried: bool
    ) -> None:
        """The newest offer is newer than the checkpoint: count, and take the residual, from there."""
        tokens, steps = (newest.tokens, newest.steps) if carried else (0, 0)
        merged = newest.trained_tokens - tokens
        if saved is not None:
            merged = saved.ledger.merged + sum(entry.tokens for entry in past.merged)
        stand.ledger.restore(trained=newest.trained_tokens, merged=merged, carried=tokens, steps=steps)
        stand.residual = self._residual_after(newest.payload)

    def _continue_offer(
        self, stand: FragmentStand, saved: FragmentStand | None, past: OwnPast, newest: Offer, replica: Replica
    ) -> Tensor | None:
        """The newest offer is newer than the checkpoint and not merged: it holds all movement there is.

        None when its payload is gone or damaged: what the checkpoint holds is then all there is.
        """
        try:
            decoded = replica.merger.fetch(newest)
        except (KeyMissing, CorruptObject) as error:
            logger.warning("own_offer_lost fragment=%d version=%d why=%s", newest.fragment, newest.version, error)
            return None
        self._restore(stand, saved, past, newest, carried=True)
        local = stand.base - dense(decoded)
        if past.open:
            stand.captured = local
        else:
            stand.ledger.release_capture()
        return local

    def _continue_saved(self, stand: FragmentStand, saved: FragmentStand, past: OwnPast, local: Tensor) -> Tensor:
        """The checkpoint is the newest there is of this site; returns the local values on the new base."""
        ledger = stand.ledger
        later = [entry for entry in past.merged if not _is_saved_capture(entry.trained_tokens, saved)]
        if later:  # an offer after the checkpoint was merged, and it held all that the checkpoint has
            merged = ledger.merged + sum(entry.tokens for entry in past.merged)
            ledger.restore(trained=max(ledger.trained, later[-1].trained_tokens), merged=merged, carried=0, steps=0)
            stand.residual = None
            return stand.base
        if saved.captured is None:
            return carry(local, saved.base, stand.base)
        if past.merged:
            ledger.settle_taken()
            stand.residual = self._residual_after(past.merged[-1].payload)
            return settle(local, saved.captured, stand.base)
        if past.open and past.newest is not None and _is_saved_capture(past.newest.trained_tokens, saved):
            stand.captured = carry(saved.captured, saved.base, stand.base)
        else:
            ledger.release_capture()
        return carry(local, saved.base, stand.base)

    def _residual_after(self, payload: str | None) -> Tensor | None:
        """What the journal says is left once that payload is merged."""
        if self._journal is None or payload is None:
            return None
        return self._journal.read(keys.parse_payload(payload)[0], payload)


def _is_saved_capture(trained_tokens: int, saved: FragmentStand | None) -> bool:
    """Whether an offer with that count is the capture that the checkpoint has out; counts tell captures apart."""
    if saved is None or saved.captured is None:
        return False
    return trained_tokens == saved.ledger.trained - saved.ledger.pending
