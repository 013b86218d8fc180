"""Rule 13: deletes what nobody needs any more. Commits stay for ever; snapshots, offers and payloads go.

Safe by its order: snapshots are listed first, then admissions are read, and the members looked at last. A site that
joins was admitted, and then says so, before it looks for a snapshot: so either its pin is seen and believed here, or it
finds a snapshot at least as new as the ones found here.
"""

import logging
from functools import partial

from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.members import Members
from composer_prime.sync.protocol import garbage_limit
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run
from composer_prime.sync.runtime import Runtime, side_by_side
from composer_prime.sync.snapshots import is_whole, vouched_snapshots

logger = logging.getLogger(__name__)


def collect_garbage(
    store: Store, run: Run, fragment: int, *, roster: Roster, members: Members, runtime: Runtime
) -> int:
    """Delete one fragment's objects that no live or joining site may need. Returns how many went."""
    sound = [
        version
        for version, sha in vouched_snapshots(store, run, roster, fragment)
        if is_whole(store, run, fragment, version, sha)
    ]
    roster.refresh()
    members.observe()
    limit = garbage_limit(sound, [pins[fragment] for pins in members.pins(runtime.now()) if len(pins) > fragment])
    if limit <= 0:
        return 0
    doomed = [key for key in store.list(keys.rounds_prefix(fragment)) if _is_garbage(key, limit, run)]
    doomed += [
        key
        for key in store.list(keys.masters_prefix(fragment))
        if keys.is_master(key) and keys.parse_master(key)[1] < limit
    ]
    # Not in `runtime.map`, whose threads the passes need: there may be thousands.
    side_by_side(runtime, "outer-garbage", [partial(store.delete, key) for key in doomed])
    if doomed:
        logger.info("garbage_collected fragment=%d below=%d objects=%d", fragment, limit, len(doomed))
    return len(doomed)


def _is_garbage(key: str, limit: int, run: Run) -> bool:
    """A payload may be named again for `max_stale_rounds` rounds after its capture, so it stays that much longer."""
    place = keys.parse_collectable(key)
    if place is None:
        return False
    return place[1] < limit - (run.terms.max_stale_rounds if keys.is_payload(key) else 0)
