"""How a run goes from its bucket: nothing before it is known that no site lives in it.

The manifest goes first, so that nobody joins, and the claims last: where they stand without a manifest nobody begins
another run. So a deletion that was cut short is never taken for a sound run.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing

from composer_prime.errors import BadInput, ProtocolError
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.members import PRESENT
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Beat
from composer_prime.sync.runtime import ThreadRuntime

Beats = Mapping[str, Beat | None]
"""The beat of each site's newest incarnation; None where it hasn't beaten yet."""
LIVENESS_S = 15.0
"""Where no manifest says: the recipe's default."""
LOOKS = 10


def refuse_live(store: Store, wait: Callable[[float], object] = time.sleep) -> Beats:
    """Raise BadInput naming the sites whose beat changes within `liveness_s`; else what the beats say.

    It waits only where the last word of some site was no farewell.
    """
    first = _beats(store)
    if any(beat is None or beat.state in PRESENT for beat in first.values()):
        try:
            liveness_s = find_manifest(store)[0].terms.liveness_s
        except (BadInput, ProtocolError):
            liveness_s = LIVENESS_S
        for _ in range(LOOKS):
            wait(liveness_s / LOOKS)
            _check_same(store, first)
    return first


def delete_run(store: Store, looked: Beats) -> None:
    """Delete all objects of a run that nobody lives in.

    looked   from `refuse_live`: BadInput, and nothing is deleted, where a site has beaten since
    """
    _check_same(store, looked)
    store.delete(keys.manifest())
    left = store.list("")
    with closing(ThreadRuntime()) as runtime:
        for claims in (False, True):
            runtime.map(store.delete, [key for key in left if keys.is_claim(key) is claims])


def is_roundless(store: Store) -> bool:
    """Whether a run made nothing that its name should be kept for."""
    places = filter(None, map(keys.place, store.list("")))
    return not any(place.kind in ("offer", "payload", "commit") for place in places)


def check_whole(store: Store) -> None:
    """Raise BadInput where a new run would begin among what is left of another one."""
    if any(map(keys.is_claim, store.list(keys.sites_prefix()))) and not store.list(keys.manifest()):
        raise BadInput(
            f"{store.uri} holds what is left of a run whose deletion was cut short: finish it with "
            f"`composer-prime delete {store.uri}`"
        )


def _beats(store: Store) -> Beats:
    claims = sorted(filter(keys.is_claim, store.list(keys.sites_prefix())))
    newest = dict(map(keys.parse_claim, claims))  # keys sort by incarnation
    return {site: find_record(store, Beat, keys.beat(site, number)) for site, number in newest.items()}


def _check_same(store: Store, before: Beats) -> None:
    live = [site for site, beat in _beats(store).items() if site not in before or beat != before[site]]
    if live:
        raise BadInput(f"site {', '.join(live)} still runs in {store.uri}: stop it first, or use another run.name")
