"""The decisions of the outer loop, as pure functions of (what I know, now): no I/O, no clock, no torch.

A driver feeds them with what it read from the bucket; a simulator can feed them with anything. What makes a record
sound is in `validity`. The rules are numbered as in docs/protocol.md.
"""

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from composer_prime.sync.terms import Terms

STAGGER_S = 1.0
"""Seconds between two sites' turns to commit the same round."""
GRACE_FLOOR_S = 1.0
"""Least grace: requests to a store far away take part of it."""
INTERVALS_KEPT = 8
"""Rounds from which a site judges how long one takes."""

Verdict = Literal["valid", "guest", "empty", "invalid"]
"""What an offer is worth: as good as it gets; of a guest, so that it is merged but makes no quorum; the word that there
is nothing to merge; none."""


def due_fragment(versions: Sequence[int]) -> int:
    """Rule 3: whose turn it is, from the log alone: the lowest next version, ties to the lowest index."""
    return min(range(len(versions)), key=lambda index: (versions[index], index))


def is_due(step: int, terms: Terms) -> bool:
    """Rule 3: whether this inner step, of those that this site has made, is a due one."""
    return step % terms.steps_per_turn == 0


def training_is_over(versions: Sequence[int], terms: Terms) -> bool:
    """Rule 11: every fragment has had its training rounds; what is left is the closing round."""
    return min(versions) >= terms.rounds


def run_is_over(versions: Sequence[int], terms: Terms) -> bool:
    """Rule 11: every fragment has reached its final version."""
    return min(versions) >= terms.final_version


@lru_cache(maxsize=1024)
def _draw(*parts: object) -> bytes:
    return hashlib.sha256(":".join(map(str, parts)).encode()).digest()


def commit_rank(site: str, live: Collection[str], fragment: int, version: int) -> int:
    """Rule 5: this site's place in the order, drawn anew for each round, in which live sites may commit it."""
    mine = _draw(fragment, version, site)
    return sum(_draw(fragment, version, name) < mine for name in live if name != site)


def guest_fault(site: str, guests: Collection[str], act: str) -> str | None:
    """Why what this site did ("made", "merged") doesn't count: guests may only offer (rule 14). None when it does."""
    return f"was {act} by {site}, a guest, which may only offer" if site in guests else None


def adaptive_grace(intervals: Sequence[float], terms: Terms) -> float:
    """Rule 5: seconds to wait for missing live sites: as long as a round takes, at most `grace_s`.

    intervals   seconds between the last rounds that this site took part in, as it saw them close; none: unknown yet
    """
    if not intervals:
        return terms.grace_s
    return min(terms.grace_s, max(GRACE_FLOOR_S, statistics.median(intervals[-INTERVALS_KEPT:])))


def takeover_s(grace_s: float) -> float:
    """Rule 10: seconds after which a part is the next site's to merge. Short: doing it twice is harmless."""
    return max(GRACE_FLOOR_S, grace_s / 4)


@dataclass(frozen=True)
class RoundView:
    """What one site knows of an open round.

    verdicts      the offers seen so far and what they are worth
    live          sites to wait for (newest incarnation, state live, beat not timed out)
    since_quorum_s   seconds since this site first saw `quorum` valid offers; None when it hasn't
    since_all_s      seconds since this site first saw an offer of every live site; None when it hasn't
    since_sound_s    seconds since this site first saw `quorum` offers that are not invalid; None when it hasn't
    """

    verdicts: Mapping[str, Verdict]
    live: frozenset[str]
    since_quorum_s: float | None
    since_all_s: float | None
    since_sound_s: float | None = None


@dataclass(frozen=True)
class RoundDecision:
    """`close` now or not; if so, which sites' offers are taken (none: a void round)."""

    close: bool
    take: tuple[str, ...] = ()
    wait_s: float = math.inf


def decide_round(view: RoundView, quorum: int, grace_s: float) -> RoundDecision:
    """Rule 5: when an open round may close, and on what.

    At once when every live site has offered and enough offers are valid, or none of them has anything to merge. After
    the grace window when enough are valid though some live site is missing. A round in which every live site has
    offered but too few are valid merges nothing, after grace: all work is carried. So does one in which enough sites
    have sound offers, but too few of them anything to merge: a site that beats and never offers can't hold it open.
    Guests' offers are taken with the valid ones, and don't make them enough.
    """
    counts = Counter(view.verdicts.values())
    worth = tuple(sorted(site for site, verdict in view.verdicts.items() if verdict in ("valid", "guest")))
    everyone = view.live <= view.verdicts.keys()
    enough = counts["valid"] >= quorum
    if enough and everyone:
        return RoundDecision(True, worth)
    if enough:
        left = grace_s - (view.since_quorum_s or 0.0)
        return RoundDecision(True, worth) if left <= 0 else RoundDecision(False, wait_s=left)
    if everyone and len(view.verdicts) >= quorum:
        if not worth and not counts["invalid"]:
            return RoundDecision(True)
        left = grace_s - (view.since_all_s or 0.0)
        return RoundDecision(True) if left <= 0 else RoundDecision(False, wait_s=left)
    if len(view.verdicts) - counts["invalid"] >= quorum:
        left = grace_s - (view.since_sound_s or 0.0)
        return RoundDecision(True) if left <= 0 else RoundDecision(False, wait_s=left)
    return RoundDecision(False)


def num_parts(num_taken: int, num_slices: int, terms: Terms) -> int:
    """Rule 10: parts in which a round of that many offers is merged; 0: every site reads every payload.

    num_slices   of this fragment's payloads; 1 when its codec can't be cut
    """
    if num_taken <= terms.gather_sites or num_slices == 1:
        return 0
    return min(num_taken, num_slices)


def reducer_rank(
    site: str,
    live: Collection[str],
    taken: Iterable[str],
    fragment: int,
    version: int,
    part: int,
    guests: Collection[str],
) -> int | None:
    """Rule 10: after how many time-outs this site merges a part: 0 at once, None never.

    Each part has a first choice among the sites taken, dealt so that nobody has two parts before everybody has one;
    after it the live sites in an order drawn per part. Sites that aren't live are passed over, and so are guests.
    """
    if site in guests:
        return None
    dealt = sorted(set(taken) - set(guests), key=lambda name: _draw(fragment, version, "deal", name))
    first = [dealt[part % len(dealt)]] if dealt else []
    others = sorted(set(live) - {*first, *guests}, key=lambda name: _draw(fragment, version, part, name))
    order = [name for name in (*first, *others) if name in live or name == site]
    return order.index(site) if site in order else None


def is_odd_one_out(ours: str, theirs: Sequence[str]) -> bool:
    """Rule 1: whether the other sites' masters say that ours is wrong.

    ours     sha256 of our master
    theirs   the base hashes that the other sites' offers of this round name

    True when more of them stand on one other master than on ours. False when there are none: nothing speaks against us.
    """
    counts = Counter(theirs)
    agreeing = counts.pop(ours, 0)
    return agreeing < max(counts.values(), default=0)


def is_stale(missed_rounds: int, terms: Terms) -> bool:
    """Rule 7: carried work that missed more than `max_stale_rounds` rounds with an offer out is dropped. A void
    round counts for nobody: no master moved away from that work."""
    return missed_rounds > terms.max_stale_rounds


def wants_snapshot(version: int, terms: Terms) -> bool:
    """Rule 11: every K rounds, and the final one, the committer stores the master that its round made."""
    return version % terms.snapshot_rounds == 0 or version == terms.final_version


def garbage_limit(snapshots: Sequence[int], pins: Iterable[int]) -> int:
    """Rule 13: versions of a fragment below this one are needed by nobody; 0 when nothing may go.

    snapshots   versions of its sound snapshots
    pins        the oldest version that each joining or live site may still need
    """
    newest = sorted(snapshots, reverse=True)
    return min([newest[1], *pins]) if len(newest) > 1 else 0
