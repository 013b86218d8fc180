"""Masters in the bucket: storing them, and finding one that the log vouches for.

A snapshot is believed only when something create-once names its hash: the manifest for version 0, the commit of the
round that starts from it, or a close record for the last one (rule 1).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing
from composer_prime.outer.master_header import HEADER_BYTES, most_nbytes, read_header
from composer_prime.outer.masters import master_sha256, pack_master, unpack_master
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.lifetime import find_close
from composer_prime.sync.reading import read_bytes
from composer_prime.sync.records import Commit
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Master:
    """Global state of one fragment after `version` rounds. Its tensors are never written again.

    weights, momentum   fp32, 1-D, same length, on the CPU; None in a run whose outer momentum is 0
    known_sha           its hash where it is known already
    """

    fragment: int
    version: int
    weights: Tensor
    momentum: Tensor | None
    known_sha: str | None = None

    @cached_property
    def sha256(self) -> str:
        """Of weights and momentum, as `outer.masters.master_sha256` defines it; computed when it is first asked for."""
        return self.known_sha or master_sha256(self.weights, self.momentum)

    def unchanged(self) -> "Master":
        """The next version after a void round: the same values."""
        return replace(self, version=self.version + 1, known_sha=self.sha256)


def store_master(store: Store, master: Master) -> str:
    """Put a snapshot at its key, which is returned. Storing it again changes nothing that a reader could notice.

    The key names the values. Another release of zstd may code them in other bytes; either decode to that hash.
    """
    key = keys.master(master.fragment, master.version, master.sha256)
    store.put(key, pack_master(master.weights, master.momentum))
    return key


def load_master(store: Store, run: Run, fragment: int, version: int, sha256: str) -> Master:
    """The snapshot of that hash. Raises KeyMissing, or CorruptObject when its bytes don't decode to it."""
    key = keys.master(fragment, version, sha256)
    master = read_master(store, run, key)
    if master.sha256 != sha256:
        raise CorruptObject(f"{key} in {store.uri} has sha256 {master.sha256}, the log says {sha256}")
    return master


def read_master(store: Store, run: Run, key: str) -> Master:
    """What a snapshot's bytes decode to, whatever its key says of the hash. Raises KeyMissing, CorruptObject."""
    fragment, version, _ = keys.parse_master(key)
    numel, momentum = run.fragments[fragment].numel, run.terms.has_momentum
    data = store.get_range(key, 0, most_nbytes(numel, momentum=momentum) + 1)
    return Master(fragment, version, *unpack_master(data, numel, momentum=momentum))


def stored_nbytes(store: Store, run: Run, fragment: int, version: int, sha256: str) -> int:
    """What a snapshot takes to fetch, as its header says. Raises KeyMissing, CorruptObject."""
    head = store.get_range(keys.master(fragment, version, sha256), 0, HEADER_BYTES)
    return read_header(head, run.fragments[fragment].numel, momentum=run.terms.has_momentum)


def vouched_sha(store: Store, run: Run, roster: Roster, fragment: int, version: int) -> str | None:
    """The hash of master(fragment, version) that something create-once names; None when nothing does yet."""
    if version == 0:
        return run.manifest.masters[fragment]
    final = run.terms.final_version
    if version < final:
        stands = _commit_at(store, fragment, version)
        return None if stands is None else _vouched_by_log(store, roster, stands, final)
    close = find_close(store, roster, final) if version == final else None
    if close is None or len(close.masters) != len(run.fragments):
        return None
    return close.masters[fragment] if roster.fault(close, close.closed_by) is None else None  # one admitted now


class _Stands(NamedTuple):
    """A commit as it stands in the bucket."""

    commit: Commit
    sha256: str


def _commit_at(store: Store, fragment: int, version: int) -> _Stands | None:
    """What stands as that commit; None when nothing does, or no commit of that round."""
    key = keys.commit(fragment, version)
    try:
        data = read_bytes(store, key)
        commit = Commit.from_bytes(data, key)
    except (KeyMissing, CorruptObject):
        return None
    return _Stands(commit, sha256_hex(data)) if commit.is_at(fragment, version) else None


def _vouched_by_log(store: Store, roster: Roster, first: _Stands, final_version: int) -> str | None:
    """The base that a commit names, if a site that is admitted now made it, or a commit that follows from it by hashes:
    who is revoked and can still write may have put commits far ahead."""
    found, fragment, version = first, first.commit.fragment, first.commit.version
    if roster.author_fault(first.commit) is not None:
        return None
    for at in range(version + 1, final_version + 1):
        following = _commit_at(store, fragment, at) if at < final_version else None
        if following is not None and roster.author_fault(following.commit) is not None:
            following = None
        if following is not None and version in following.commit.voids:
            return None
        if roster.fault(found.commit, found.commit.committer) is None:
            return first.commit.base_sha
        if following is None or following.commit.previous != found.sha256:
            return None
        found = following
    return None


def vouched_snapshots(
    store: Store, run: Run, roster: Roster, fragment: int, at_most: int | None = None
) -> Iterator[tuple[int, str]]:
    """(version, sha256) of the stored snapshots that the log vouches for, newest first, none above `at_most`."""
    stored = {keys.parse_master(key)[1:] for key in store.list(keys.masters_prefix(fragment)) if keys.is_master(key)}
    for version in sorted({version for version, _ in stored}, reverse=True):
        if at_most is not None and version > at_most:
            continue
        sha = vouched_sha(store, run, roster, fragment, version)
        if sha is not None and (version, sha[: keys.SHA_DIGITS]) in stored:
            yield version, sha


def newest_master(
    store: Store,
    run: Run,
    roster: Roster,
    fragment: int,
    *,
    at_most: int | None = None,
    above: int = -1,
) -> Master | None:
    """The newest stored master of a fragment that is whole and vouched for, from version `above` + 1 to `at_most`.

    One that is corrupt, or that can't be read though it is listed, is passed over with a warning, since an older one
    and the log make the same master. None: no such. Raises KeyMissing when none is left but such as are missing: those
    may have been collected between the listing and the reading.
    """
    missing: KeyMissing | None = None
    for version, sha in vouched_snapshots(store, run, roster, fragment, at_most):
        if version <= above:
            break
        try:
            return load_master(store, run, fragment, version, sha)
        except (KeyMissing, CorruptObject) as error:
            logger.warning("snapshot_refused fragment=%d version=%d error=%s", fragment, version, error)
            missing = error if isinstance(error, KeyMissing) else missing
    if missing is not None:
        raise missing
    return None


def is_whole(store: Store, run: Run, fragment: int, version: int, sha256: str) -> bool:
    """Whether a snapshot has all its bytes, without reading them: puts are whole or not at all, so that is enough."""
    try:
        nbytes = stored_nbytes(store, run, fragment, version, sha256)
        return len(store.get_range(keys.master(fragment, version, sha256), nbytes - 1, 2)) == 1
    except (KeyMissing, CorruptObject):
        return False
