"""Rule 11: the master from which a process that comes in follows the log, chosen so that it stands there soonest.

A trained master hardly compresses, while the first one may lie on this machine already, or came from bf16; with sparse
payloads, dozens of rounds on it are fewer bytes than the newest snapshot. Bytes and rounds are weighed by the link.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing
from composer_prime.outer.fragments import Fragment
from composer_prime.outer.halves import UPPER, half_nbytes
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.reading import read_bytes
from composer_prime.sync.records import Commit
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import FragmentCoding, Run
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.snapshots import (
    Master,
    Upper,
    load_master,
    load_upper,
    read_ends,
    stored_nbytes,
    vouched_sha,
    vouched_snapshots,
)

logger = logging.getLogger(__name__)

OwnValues = Callable[[Fragment], tuple[int, Tensor]]
"""A version, and the values of a fragment, fp32 [n], that this process takes for its master: by the hash it is found
out. Nobody writes to them afterwards."""

REPLAY_NS = 10.0
"""CPU nanoseconds to apply a round, for each parameter of the fragment: the mean, the outer step, the master's hash."""
WORTH = 0.9
"""An upper half is begun with where it takes at most this share of the seconds that a whole master would."""
WINDOW = 8
"""Commits that are read at first; then twice as many, and so on."""
FIRST_PIECE, PIECE_GROWTH, PROBE_S = 256 * 1024, 4, 0.2
"""The link is measured by pieces of a snapshot, each so many times longer, until one takes that long."""


@dataclass(frozen=True)
class Beginning:
    """A master to begin from.

    nbytes   that it takes to fetch; 0 for one that is held
    held     whether this process has its values
    ends     where its planes end, if no more than its upper half is to be fetched now
    """

    version: int
    sha256: str
    nbytes: int
    held: bool = False
    ends: tuple[int, ...] | None = None


def seconds_to(newest: int, beginning: Beginning, log: Mapping[int, int], *, byte_s: float, replay_s: float) -> float:
    """Seconds until a process that begins there stands on master `newest`; infinite where the log isn't known whole.

    log        bytes of each round that is there, by version
    byte_s     seconds to fetch a byte
    replay_s   seconds of CPU to apply a round
    """
    rounds = range(beginning.version, newest)
    if any(version not in log for version in rounds):
        return float("inf")
    return (beginning.nbytes + sum(log[version] for version in rounds)) * byte_s + len(rounds) * replay_s


def quickest(
    newest: Beginning, others: Sequence[Beginning], log: Mapping[int, int], *, byte_s: float, replay_s: float
) -> Beginning:
    """The beginning from which the present is reached soonest; of equal ones the newest. Rounds after `newest`, the
    newest snapshot, are everybody's and don't count; nothing to fetch beats it from any version at or above."""
    ahead = [other for other in others if other.version >= newest.version and other.held]
    if ahead:
        return max(ahead, key=lambda other: other.version)
    ranked = sorted((newest, *others), key=lambda each: -each.version)
    return min(
        ranked, key=lambda each: seconds_to(newest.version, each, log, byte_s=byte_s, replay_s=replay_s)
    )  # the first of equal ones


def begin(
    store: Store, run: Run, roster: Roster, runtime: Runtime, own: OwnValues | None, patience_s: float | None = None
) -> list[Master | Upper | None]:
    """For each fragment the master to follow the log from; None: nothing was found to choose from, look as ever.

    patience_s   seconds that whole masters may take; if they would take more, some come as upper halves. None: any time

    Call after this process's first beat, which pins everything. Raises StoreError.
    """
    stored = runtime.map(lambda fragment: _stored(store, run, roster, fragment.index), run.fragments)
    held = {} if own is None else _held(store, run, roster, own)
    link = _Link(store, runtime)
    choices = [
        None
        if newest is None
        else _choose(store, run, runtime, link, coding, newest, first, held, always_measure=patience_s is not None)
        for coding, (newest, first) in zip(run.codings, stored, strict=True)
    ]
    if patience_s is not None and sum(choice.seconds for choice in choices if choice is not None) > patience_s:
        choices = [None if choice is None else _sooner(store, run, choice) for choice in choices]
    whole = [choice for choice in filter(None, choices) if choice.begins.ends is None]
    halves = [choice for choice in filter(None, choices) if choice.begins.ends is not None]
    masters = runtime.map(lambda choice: _fetch(store, run, choice, held), whole)
    found: dict[int, Master | Upper | None] = {
        choice.fragment: master for choice, master in zip(whole, masters, strict=True)
    }
    # Upper halves one after another, each of the newest snapshot by then: less of the log is left to follow.
    for choice in halves:
        found[choice.fragment] = _fetch_upper(store, run, roster, runtime, choice, is_first=not found)
    return [found.get(fragment.index) for fragment in run.fragments]


@dataclass(frozen=True)
class _Choice:
    """Where one fragment begins.

    newest    its newest snapshot
    byte_s    seconds that a byte takes; 0 where that wasn't asked
    seconds   until its master stands at the newest snapshot's version
    """

    fragment: int
    begins: Beginning
    newest: Beginning
    byte_s: float
    seconds: float

    def log(self) -> None:
        """Say so."""
        begins, newest = self.begins, self.newest
        at = "upper" if begins.ends else "newest" if begins.version == newest.version else "first"
        logger.info(
            "begins fragment=%d at=%s version=%d snapshot=%d bytes=%d snapshot_bytes=%d byte_s=%.3g",
            *(self.fragment, "held" if begins.held else at, begins.version, newest.version),
            *(begins.nbytes, newest.nbytes, self.byte_s),
        )


def _sooner(store: Store, run: Run, choice: _Choice) -> _Choice:
    """The upper half of the newest snapshot, where that comes clearly sooner than what was chosen."""
    newest = choice.newest
    try:
        ends = read_ends(store, run, choice.fragment, newest.version, newest.sha256)
    except (KeyMissing, CorruptObject):
        return choice
    numel, momentum = run.fragments[choice.fragment].numel, run.terms.has_momentum
    nbytes = ends[0] + half_nbytes(ends, numel, momentum=momentum, half=UPPER)
    seconds = nbytes * choice.byte_s
    if seconds >= WORTH * choice.seconds:
        return choice
    return replace(choice, begins=replace(newest, nbytes=nbytes, ends=ends), seconds=seconds)


class _Link:
    """How fast the link is, measured when it is first asked for."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store = store
        self._runtime = runtime
        self._byte_s: float | None = None

    def byte_s(self, key: str, nbytes: int) -> float:
        """Seconds that a byte takes; `key` has `nbytes`, of which as many are read as it takes to tell."""
        if self._byte_s is None:
            self._byte_s = self._measure(key, nbytes)
        return self._byte_s

    def _measure(self, key: str, nbytes: int) -> float:
        at, length = 0, FIRST_PIECE
        while True:
            started = self._runtime.now()
            got = len(self._store.get_range(key, at, min(length, nbytes - at)))
            took_s = self._runtime.now() - started
            at += got
            if took_s >= PROBE_S or at >= nbytes or not got:
                return took_s / max(got, 1)
            length *= PIECE_GROWTH


def _choose(
    store: Store,
    run: Run,
    runtime: Runtime,
    link: _Link,
    coding: FragmentCoding,
    newest: Beginning,
    first: Beginning | None,
    held: Mapping[int, Master],
    *,
    always_measure: bool,
) -> _Choice:
    """The quickest beginning of one fragment: its newest snapshot, its first master, or what this process holds."""
    fragment = coding.fragment
    others = [] if first is None else [first]
    mine = held.get(fragment.index)
    if mine is not None and _log_is_whole(store, run, fragment.index, mine.version):
        others.append(Beginning(mine.version, mine.sha256, 0, held=True))
    log = _log_bytes(store, runtime, coding, others, newest)
    byte_s, replay_s = 0.0, fragment.numel * REPLAY_NS * 1e-9
    is_ahead = mine is not None and mine.version >= newest.version
    if (always_measure and not is_ahead) or any(other.version in log for other in others):
        byte_s = link.byte_s(keys.master(fragment.index, newest.version, newest.sha256), newest.nbytes)
    best = quickest(newest, others, log, byte_s=byte_s, replay_s=replay_s)
    seconds = 0.0 if is_ahead else seconds_to(newest.version, best, log, byte_s=byte_s, replay_s=replay_s)
    return _Choice(fragment.index, best, newest, byte_s, seconds)


def _stored(store: Store, run: Run, roster: Roster, fragment: int) -> tuple[Beginning | None, Beginning | None]:
    """The newest snapshot that the log vouches for, and the first master of all where it is another one."""
    vouched = next(vouched_snapshots(store, run, roster, fragment), None)
    newest = None if vouched is None else _sized(store, run, fragment, *vouched)
    if newest is None or newest.version == 0:
        return newest, None
    return newest, _sized(store, run, fragment, 0, run.manifest.masters[fragment])


def _sized(store: Store, run: Run, fragment: int, version: int, sha256: str) -> Beginning | None:
    try:
        return Beginning(version, sha256, stored_nbytes(store, run, fragment, version, sha256))
    except (KeyMissing, CorruptObject):
        return None


def _held(store: Store, run: Run, roster: Roster, own: OwnValues) -> dict[int, Master]:
    """The fragments of which this process holds a master, by its hash: all, or after the smallest none is looked at."""
    found: dict[int, Master] = {}
    for fragment in sorted(run.fragments, key=lambda each: each.numel):
        version, values = own(fragment)
        if version > 0 and run.terms.has_momentum:
            break  # a site doesn't keep outer momentum
        momentum = torch.zeros_like(values) if run.terms.has_momentum else None
        sha = vouched_sha(store, run, roster, fragment.index, version)
        if sha is None:
            continue  # no round that starts from it has closed
        master = Master(fragment.index, version, values, momentum)
        if sha != master.sha256:
            break
        found[fragment.index] = master
    return found


def _log_is_whole(store: Store, run: Run, fragment: int, version: int) -> bool:
    """Whether what rounds from `version` on are made of is kept: a snapshot goes with the log behind it (rule 13)."""
    if run.terms.keep_log:
        return True
    stored = (key for key in store.list(keys.masters_prefix(fragment)) if keys.is_master(key))
    return any(keys.parse_master(key)[1] <= version for key in stored)


def _log_bytes(
    store: Store, runtime: Runtime, coding: FragmentCoding, others: Sequence[Beginning], newest: Beginning
) -> dict[int, int]:
    """Bytes of the rounds before the newest snapshot, back to the oldest beginning, or until it is clear that they
    outweigh it: those back to the nearest beginning, if the ones not looked at are like the others."""
    log: dict[int, int] = {}
    oldest = min((other.version for other in others), default=newest.version)
    nearest = max((other.version for other in others), default=newest.version)
    fragment, stop, window = coding.fragment.index, newest.version, WINDOW
    while stop > oldest:
        versions = range(max(oldest, stop - window), stop)
        sizes = runtime.map(lambda version: _round_bytes(store, coding, keys.commit(fragment, version)), versions)
        log.update((version, size) for version, size in zip(versions, sizes, strict=True) if size is not None)
        stop, window = versions.start, 2 * window
        if sum(log.values()) * max(1.0, (newest.version - nearest) / (newest.version - stop)) > newest.nbytes:
            break
    return log


def _round_bytes(store: Store, coding: FragmentCoding, key: str) -> int | None:
    """What a round takes to fetch; None when its commit is gone. One that can't be read took nothing."""
    try:
        data = read_bytes(store, key)
    except KeyMissing:
        return None
    try:
        commit = Commit.from_bytes(data, key)
    except CorruptObject:
        return len(data)
    if commit.num_parts:
        return len(data) + coding.merged_codec.nbytes(coding.fragment.numel)
    return len(data) + sum(entry.offer.nbytes for entry in commit.taken)


def _fetch_upper(
    store: Store, run: Run, roster: Roster, runtime: Runtime, choice: _Choice, *, is_first: bool
) -> Upper | None:
    newest, _ = (choice.newest, None) if is_first else _stored(store, run, roster, choice.fragment)
    if newest is not None and newest.version > choice.newest.version:
        choice = _sooner(store, run, replace(choice, newest=newest, seconds=float("inf")))
    choice.log()
    begins, fragment = choice.begins, choice.fragment
    try:
        assert begins.ends is not None
        return load_upper(store, run, fragment, begins.version, begins.sha256, begins.ends, runtime.map)
    except (KeyMissing, CorruptObject) as error:
        logger.warning("snapshot_refused fragment=%d version=%d error=%s", fragment, begins.version, error)
        return None


def _fetch(store: Store, run: Run, choice: _Choice, held: Mapping[int, Master]) -> Master | None:
    choice.log()
    beginning, fragment = choice.begins, choice.fragment
    if beginning.held:
        return held[fragment]
    try:
        return load_master(store, run, fragment, beginning.version, beginning.sha256)
    except (KeyMissing, CorruptObject) as error:
        logger.warning("snapshot_refused fragment=%d version=%d error=%s", fragment, beginning.version, error)
        return None
