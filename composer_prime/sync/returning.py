"""Rules 11 and 12: where a site stands when it comes into a run, for the first time or back from a crash.

A checkpoint may be older than the last offer its site made; the bucket knows better. Nothing is counted twice: movement
that a commit took is left out, movement that is still out or was passed over is carried.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing
from composer_prime.outer.fragments import Fragment
from composer_prime.outer.merge import carry, settle
from composer_prime.outer.pseudograd import flatten, rounded, write_back
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.ledger import FragmentLedger
from composer_prime.sync.records import Commit, Manifest, Offer
from composer_prime.sync.replica import Payloads
from composer_prime.sync.snapshots import Master


@dataclass
class FragmentStand:
    """Where a site stands with one fragment. Owned and mutated by the site's `OuterLoop`.

    version    of the master the site adopted
    base       fp32, 1-D: that master's weights, rounded to the parameters' dtype; local minus base is own movement
    captured   fp32, 1-D: local values behind the capture that is out, shifted along when the base moves; None: none out
    """

    version: int
    base: Tensor
    captured: Tensor | None = None
    ledger: FragmentLedger = field(default_factory=FragmentLedger)

    def to_dict(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {"version": self.version, "base": self.base, "captured": self.captured, "ledger": self.ledger.to_dict()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "FragmentStand":
        """What `to_dict` gave."""
        return cls(state["version"], state["base"], state["captured"], FragmentLedger(**state["ledger"]))


@dataclass(frozen=True)
class OwnOffer:
    """The newest offer record of this site's name that a checkpoint may not know of."""

    record: Offer
    taken: bool
    open: bool
    """Whether its round is still open."""


def newest_own_offer(store: Store, fragment: int, site: str, since: int, open_version: int) -> OwnOffer | None:
    """This site's newest offer in the rounds from `since` to the open one, and what became of it."""
    for version in range(open_version, since - 1, -1):
        key = keys.offer(fragment, version, site)
        try:
            record = Offer.from_bytes(store.get(key), key)
        except (KeyMissing, CorruptObject):
            continue
        return OwnOffer(record, _was_taken(store, record), version == open_version)
    return None


def _was_taken(store: Store, offer: Offer) -> bool:
    key = keys.commit(offer.fragment, offer.version)
    try:
        commit = Commit.from_bytes(store.get(key), key)
    except (KeyMissing, CorruptObject):
        return False
    return any(entry.site == offer.site and entry.payload == offer.payload for entry in commit.taken)


def stand_on(
    store: Store,
    manifest: Manifest,
    site: str,
    fragment: Fragment,
    params: Mapping[str, Tensor],
    master: Master,
    saved: FragmentStand | None,
) -> tuple[FragmentStand, Offer | None]:
    """Put one fragment's parameters on `master`, the newest one, with whatever own movement is not merged yet.

    saved    from the checkpoint whose parameters `params` hold; None when it has none: `params` then count for nothing

    Returns where the site stands, and the own offer that is still out in the open round, to be followed to its end.
    """
    new_base = rounded(master.weights, params, fragment)
    since = max(0, master.version - 1) if saved is None else saved.version
    own = newest_own_offer(store, fragment.index, site, since, master.version)
    stand = FragmentStand(master.version, new_base, ledger=FragmentLedger() if saved is None else saved.ledger)
    if saved is None and own is None:
        write_back(master.weights, params, fragment)
        return stand, None
    if saved is not None and not _is_newer(own, saved):
        local = _continue_saved(stand, saved, own, flatten(params, fragment))
    else:
        assert own is not None
        local = _continue_offer(stand, own, Payloads(store, manifest.terms.codec, fragment.numel))
    write_back(local, params, fragment)
    pending = own.record if own is not None and own.open and stand.captured is not None else None
    return stand, pending


def _captured_total(ledger: FragmentLedger) -> int:
    """All tokens trained up to the capture that is out; an offer's record states the same number."""
    return ledger.trained - ledger.pending


def _is_newer(own: OwnOffer | None, saved: FragmentStand) -> bool:
    """Whether the offer was captured after the checkpoint."""
    if own is None:
        return False
    return saved.captured is None or own.record.trained_tokens != _captured_total(saved.ledger)


def _continue_saved(stand: FragmentStand, saved: FragmentStand, own: OwnOffer | None, local: Tensor) -> Tensor:
    """The checkpoint is the newest there is of this site; returns the local values on the new base."""
    if saved.captured is None:
        return carry(local, saved.base, stand.base)
    if own is not None and own.taken:
        stand.ledger.settle_taken()
        return settle(local, saved.captured, stand.base)
    if own is not None and own.open:
        stand.captured = carry(saved.captured, saved.base, stand.base)
    else:
        stand.ledger.release_capture()
    return carry(local, saved.base, stand.base)


def _continue_offer(stand: FragmentStand, own: OwnOffer, payloads: Payloads) -> Tensor:
    """An offer newer than the checkpoint holds all movement there is; returns the local values on the new base."""
    record = own.record
    settled = own.taken or record.payload is None
    stand.ledger.restore_offer(record.tokens, record.steps, record.trained_tokens, taken=settled)
    if record.payload is None or record.sha256 is None or own.taken:
        return stand.base
    local = stand.base - payloads.fetch(record.payload, record.sha256)
    if own.open:
        stand.captured = local
    else:
        stand.ledger.release_capture()
    return local
