"""Masters in the bucket: storing them, and finding one that the log vouches for.

A snapshot is believed only when something create-once names its hash: the manifest for version 0, the commit of the
round that starts from it, or close.json for the last one (rule 1).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing
from composer_prime.outer.masters import master_sha256, pack_master, unpack_master
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.records import Close, Commit, Manifest, sha256_hex

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Master:
    """Global state of one fragment after `version` rounds. Its tensors are never written again.

    weights, momentum   fp32, 1-D, same length, on the CPU
    sha256              of both, as `outer.masters.master_sha256` defines it
    """

    fragment: int
    version: int
    weights: Tensor
    momentum: Tensor
    sha256: str

    @classmethod
    def of(cls, fragment: int, version: int, weights: Tensor, momentum: Tensor) -> "Master":
        """A master with its hash computed."""
        return cls(fragment, version, weights, momentum, master_sha256(weights, momentum))


def store_master(store: Store, master: Master) -> str:
    """Put a snapshot at its content-addressed key, which is returned. Storing it again changes nothing."""
    key = keys.master(master.fragment, master.version, master.sha256)
    store.put(key, pack_master(master.weights, master.momentum))
    return key


def load_master(store: Store, fragment: int, version: int, sha256: str, numel: int) -> Master:
    """The snapshot of that hash. Raises KeyMissing, or CorruptObject when its bytes don't have the hash."""
    key = keys.master(fragment, version, sha256)
    weights, momentum = unpack_master(store.get(key), numel)
    master = Master.of(fragment, version, weights, momentum)
    if master.sha256 != sha256:
        raise CorruptObject(f"{key} in {store.uri} has sha256 {master.sha256}, the log says {sha256}")
    return master


def vouched_sha(store: Store, manifest: Manifest, fragment: int, version: int) -> str | None:
    """The hash of master(fragment, version) that something create-once names; None when nothing does yet."""
    if version == 0:
        return manifest.masters[fragment]
    try:
        return Commit.from_bytes(store.get(keys.commit(fragment, version)), "commit").base_sha
    except (KeyMissing, CorruptObject):
        pass
    try:
        close = Close.from_bytes(store.get(keys.close()), keys.close())
    except (KeyMissing, CorruptObject):
        return None
    return close.masters[fragment] if close.versions[fragment] == version else None


def vouched_snapshots(
    store: Store, manifest: Manifest, fragment: int, at_most: int | None = None
) -> Iterator[tuple[int, str]]:
    """(version, sha256) of the stored snapshots that the log vouches for, newest first, none above `at_most`."""
    stored = {keys.parse_master(key)[1:] for key in store.list(keys.masters_prefix(fragment)) if keys.is_master(key)}
    for version in sorted({version for version, _ in stored}, reverse=True):
        if at_most is not None and version > at_most:
            continue
        sha = vouched_sha(store, manifest, fragment, version)
        if sha is not None and (version, sha[: keys.SHA_DIGITS]) in stored:
            yield version, sha


def newest_master(store: Store, manifest: Manifest, fragment: int, numel: int, at_most: int | None = None) -> Master:
    """The newest stored master of a fragment that is whole and vouched for.

    A corrupt snapshot is passed over with a warning, since an older one and the log make the same master.
    Raises CorruptObject when there is none at all.
    """
    for version, sha in vouched_snapshots(store, manifest, fragment, at_most):
        try:
            return load_master(store, fragment, version, sha, numel)
        except CorruptObject as error:
            logger.warning("snapshot_refused fragment=%d version=%d error=%s", fragment, version, error)
    raise CorruptObject(
        f"{store.uri} holds no sound snapshot of fragment {fragment} that its log vouches for: "
        "the run can't be joined; restore masters/ from a backup or start a new run"
    )


def previous_sha(store: Store, manifest_sha: str, fragment: int, version: int) -> str:
    """What commit(fragment, version) must name as its predecessor: the hash of the record before it."""
    if version == 0:
        return manifest_sha
    return sha256_hex(store.get(keys.commit(fragment, version - 1)))
