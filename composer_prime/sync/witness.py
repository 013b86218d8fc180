"""What one site tells of the offers that rounds took: whose was clipped, whose stood against the round, whose record
was put over by another. It goes on the tape and decides nothing: no record's validity, no bit of a master.

Only a site that takes part has a witness; masters that are rebuilt or verified have none.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from composer_prime.errors import SiteRevoked, StoreError, StoreUnusable
from composer_prime.outer.sparse import Sparse, Vector, dense
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Commit, Offer, Part, Taken
from composer_prime.sync.roster import Roster
from composer_prime.sync.runtime import Runtime, Task
from composer_prime.sync.tape import Tape
from composer_prime.sync.terms import Terms
from composer_prime.sync.validity import clipped

logger = logging.getLogger(__name__)

MIN_TAKEN = 3
"""Fewer offers have no round to stand against: of two that differ neither is the odd one."""
SAMPLE_BLOCKS, BLOCK_ELEMENTS = 2**6, 2**12
"""Of a longer vector so many blocks of so many neighbours are looked at: milliseconds an offer, however long it is."""
NOTHING = 1e-6
"""Sums of vectors of length 1 that are no longer than this are rounding: those cancel each other."""


def agreement(vectors: Mapping[str, Vector]) -> dict[str, float]:
    """The cosine of each movement with the sum of the others' directions, by site, 3 digits.

    vectors   fp32 [n] each, or each sparse: then looked at where it has values

    Every other movement counts alike, however long it is, and none speaks for itself: what flips the way that others
    go is below 0 as soon as they have one in common. Of more than 2^18 elements a sample, the same at every site.
    Nothing of fewer than three movements, and no site whose movement is all zero, or isn't finite.
    """
    sparse = {site: vector for site, vector in vectors.items() if isinstance(vector, Sparse)}
    if sparse:
        found = _sparse_cosines(sparse)
    else:
        found = _dense_cosines({site: dense(vector).numpy() for site, vector in vectors.items()})
    return {site: round(cosine, 3) + 0.0 for site, cosine in found.items()}


def _dense_cosines(vectors: Mapping[str, np.ndarray]) -> dict[str, float]:
    samples = {site: _picked(vector, sample_spans(len(vector))).astype(np.float64) for site, vector in vectors.items()}
    directions = _directions(samples)
    if not directions:
        return {}
    total = sum(directions.values(), np.zeros(()))
    cosines = {site: _cosine(direction, total - direction) for site, direction in directions.items()}
    return {site: cosine for site, cosine in cosines.items() if cosine is not None}


def _sparse_cosines(vectors: Mapping[str, Sparse]) -> dict[str, float]:
    directions = _directions({site: vector.values.astype(np.float64) for site, vector in vectors.items()})
    if not directions:
        return {}
    total = np.zeros(next(iter(vectors.values())).length, dtype=np.float32)
    for site, direction in directions.items():
        total[vectors[site].places] += direction.astype(np.float32)
    cosines: dict[str, float | None] = {}
    for site, direction in directions.items():
        few = sample_spans(len(direction))
        own = _picked(direction, few)
        cosines[site] = _cosine(own, total[_picked(vectors[site].places, few)] - own.astype(np.float32))
    return {site: cosine for site, cosine in cosines.items() if cosine is not None}


def _directions(vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of fp64 vectors those of length 1; none where fewer than three have a direction."""
    lengths = {site: _length(vector) for site, vector in vectors.items()}
    found = {site: vectors[site] / length for site, length in lengths.items() if 0 < length < math.inf}
    return found if len(found) >= MIN_TAKEN else {}


@lru_cache(maxsize=64)
def sample_spans(length: int) -> tuple[slice, ...]:
    """Which elements of so many are looked at: all, or blocks from the first to the last in equal distances."""
    if length <= SAMPLE_BLOCKS * BLOCK_ELEMENTS:
        return (slice(0, length),)
    starts = ((length - BLOCK_ELEMENTS) * index // (SAMPLE_BLOCKS - 1) for index in range(SAMPLE_BLOCKS))
    return tuple(slice(start, start + BLOCK_ELEMENTS) for start in starts)


def _picked(values: np.ndarray, spans: Sequence[slice]) -> np.ndarray:
    return values[spans[0]] if len(spans) == 1 else np.concatenate([values[span] for span in spans])


def _length(x: np.ndarray) -> float:
    """Of fp64, in which no square of an fp32 value overflows or vanishes."""
    return math.sqrt(np.dot(x, x))


def _cosine(x: np.ndarray, y: np.ndarray) -> float | None:
    """None where one of them has no direction; what rounding left of nothing is none."""
    scale = _length(x) * _length(y)
    return float(np.dot(x, y)) / scale if scale > NOTHING else None


def is_second_record(stands: Offer, taken: Offer, *, is_atomic: bool) -> bool:
    """Whether what stands at the key of an offer that was taken is another offer for the same round.

    is_atomic   whether the store lets one writer of a key win. In one that doesn't, two processes of one name may each
                have made a record, honestly: there only a second one of the same process counts.
    """
    place = (taken.site, taken.fragment, taken.version)
    if stands == taken or (stands.site, stands.fragment, stands.version) != place:
        return False
    return is_atomic or stands.incarnation == taken.incarnation


@dataclass
class _Committed:
    """A round that this site's commit closed, and the admission record under which its offers were signed.

    looked_at   whether its offers were read again already
    told        sites of which the tape says already that they have put another offer over the one that was taken
    """

    fragment: int
    version: int
    admissions: int
    taken: tuple[Taken, ...] = ()
    looked_at: bool = False
    told: set[str] = field(default_factory=set)


class Witness:
    """What one site has seen and not told yet. Merging, passes and the end each call from their own thread."""

    def __init__(self, store: Store, *, runtime: Runtime, roster: Roster, terms: Terms, tape: Tape) -> None:
        self._store = store
        self._runtime = runtime
        self._roster = roster
        self._terms = terms
        self._tape = tape
        self._agreements: dict[int, tuple[int, dict[str, float]]] = {}
        self._created: dict[int, _Committed] = {}
        self._unread: dict[int, list[_Committed]] = defaultdict(list)
        self._tasks: list[Task] = []

    # --- while a round is merged ------------------------------------------------------------------------------------

    def gathered(self, commit: Commit, vectors: Mapping[str, Vector]) -> None:
        """This site has read every payload of a round."""
        self._agreements[commit.fragment] = commit.version, agreement(vectors)

    def reduced(self, part: Part, vectors: Mapping[str, Vector]) -> None:
        """This site's record of a part stands: only who merged it has seen the slices."""
        self._tape.write(
            "part",
            fragment=part.fragment,
            version=part.version,
            part=part.part,
            excluded={entry.site: entry.why for entry in part.excluded},
            agreement=agreement(vectors),
        )

    # --- when it has closed -----------------------------------------------------------------------------------------

    def created(self, fragment: int, version: int) -> None:
        """This site's commit closes that round. To be called before admissions are read anew."""
        if self._roster.signed:
            self._created[fragment] = _Committed(fragment, version, self._roster.newest)

    def settle(
        self, fragment: int, version: int, taken: tuple[Taken, ...], seen: Mapping[str, Offer]
    ) -> dict[str, Any]:
        """What the tape is to say of a closed round's offers.

        seen   the sound offers that this site had read, by site: where another was taken, two were made

        Of the rounds that this site closed the offers are read twice more: when the next round has closed, since who
        would put a second record over an offer has had a whole round for it, and `max_stale_rounds` rounds later, when
        no site needs that record any more.
        """
        self._read_again(fragment, version)
        told = self._tell_second(taken, seen)
        own = self._created.pop(fragment, None)
        if own is not None and own.version == version and taken:
            self._unread[fragment].append(_Committed(fragment, version, own.admissions, taken, told=told))
        compared_at, cosines = self._agreements.pop(fragment, (version, {}))
        return {
            "clipped": clipped(taken, self._terms, self._roster.authority().guests),
            "agreement": cosines if compared_at == version and taken else {},
        }

    def finish(self, wait_s: float) -> None:
        """Read the last rounds' offers again and write out what there is to tell, `wait_s` seconds a round at most."""
        for fragment in list(self._unread):
            self._read_again(fragment)
        for task in self._tasks:
            if task.is_alive():
                task.join(timeout=wait_s)
        try:
            self._tape.flush()
        except (StoreError, StoreUnusable, SiteRevoked) as error:
            logger.warning("tape_not_flushed error=%s", error)

    # --- second records ---------------------------------------------------------------------------------------------

    def _tell_second(self, taken: tuple[Taken, ...], seen: Mapping[str, Offer]) -> set[str]:
        """Sites that put another record over their offer before the commit took one of both."""
        if not self._roster.signed:
            return set()
        is_atomic = self._roster.authority().committer is None
        told = set()
        for entry in taken:
            before = seen.get(entry.site)
            if before is not None and is_second_record(entry.offer, before, is_atomic=is_atomic):
                self._tell(entry.offer)
                told.add(entry.site)
        return told

    def _tell(self, taken: Offer) -> None:
        place = {"fragment": taken.fragment, "version": taken.version}
        logger.warning("offer_put_over fragment=%d version=%d site=%s", *place.values(), taken.site)
        self._tape.write("equivocated", by=taken.site, **place)

    def _read_again(self, fragment: int, version: int | None = None) -> None:
        """Beside the passes: n requests of a round at each of two looks, by one site.

        version   of the round that has closed now; None: this site leaves, and looks at all for the last time
        """
        waiting = self._unread.pop(fragment, [])
        for committed in waiting:
            age = math.inf if version is None else version - committed.version
            if age < self._terms.max_stale_rounds:
                self._unread[fragment].append(committed)
                if committed.looked_at:
                    continue
            committed.looked_at = True
            self._tasks = [task for task in self._tasks if task.is_alive()]
            self._tasks.append(self._runtime.spawn("outer-witness", partial(self._look, committed)))

    def _look(self, committed: _Committed) -> None:
        try:
            for taken in self._put_over(committed):
                committed.told.add(taken.site)
                self._tell(taken)
        except (StoreError, StoreUnusable, SiteRevoked) as error:
            place = committed.fragment, committed.version
            logger.warning("offers_not_read_again fragment=%d version=%d error=%s", *place, error)

    def _put_over(self, committed: _Committed) -> Iterator[Offer]:
        """Offers taken whose sites have signed another one for that round since, which stands there now.

        What was collected as garbage, and what isn't signed by the site, proves nothing.
        """
        offers = [entry.offer for entry in committed.taken if entry.site not in committed.told]
        found = self._runtime.map(
            lambda offer: find_record(self._store, Offer, keys.offer(offer.fragment, offer.version, offer.site)), offers
        )
        is_atomic = self._roster.authority(committed.admissions).committer is None
        for taken, stands in zip(offers, found, strict=True):
            if stands is None or not is_second_record(stands, taken, is_atomic=is_atomic):
                continue
            if self._roster.fault(stands, taken.site, committed.admissions) is None:
                yield taken
