"""A run from its manifest to its end, as far as records alone tell: no torch, so that any command may look."""

from composer_prime.errors import BadInput, KeyMissing
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.protocol import guest_fault
from composer_prime.sync.reading import check_protocol, find_record, read_bytes
from composer_prime.sync.records import Close, Manifest
from composer_prime.sync.roster import Roster
from composer_prime.sync.terms import Terms


def read_manifest(data: bytes) -> Manifest:
    """Parse a manifest's bytes. Raises ProtocolError when it speaks another version, CorruptObject when it is none."""
    check_protocol(data, keys.manifest())
    return Manifest.from_bytes(data, keys.manifest())


def find_manifest(store: Store) -> tuple[Manifest, str]:
    """(manifest, sha256 of its bytes) of the run whose root `store` is.

    Raises BadInput when no run is there, ProtocolError or CorruptObject when its manifest can't be read.
    """
    try:
        data = read_bytes(store, keys.manifest())
    except KeyMissing:
        raise BadInput(
            f"{store.uri} holds no run: there is no {keys.manifest()}. Name the folder of one run, in which its "
            f"{keys.manifest()} lies beside rounds, masters and sites: s3://bucket/prefix/run-name, or a plain path"
        ) from None
    return read_manifest(data), sha256_hex(data)


def find_close(store: Store, roster: Roster, end: int) -> Close | None:
    """The run's close record where it is sound; None where there is none.

    end   the run's final version
    """
    close = find_record(store, Close, keys.close())
    return None if close is None or close_fault(roster, close, end) is not None else close


def has_ended(store: Store, roster: Roster, terms: Terms) -> bool:
    """Whether a run is over: the close record stands, and every fragment has had all its rounds. A close record alone
    says nothing, since any member may put one at any time."""
    if find_close(store, roster, terms.final_version) is None:
        return False
    for fragment in range(terms.fragments):
        there = set(store.list(keys.rounds_prefix(fragment)))
        if not all(keys.commit(fragment, version) in there for version in range(terms.final_version)):
            return False
    return True


def close_fault(roster: Roster, close: Close, end: int) -> str | None:
    """Why what stands as the close record isn't one of the run's end, version `end`, that its site signed; None when
    it is.

    It names no admission record, and its site may have been revoked since: any list that admits it will do.
    """
    if set(close.versions) != {end}:
        return f"doesn't end every fragment at version {end}"
    if not len(close.versions) == len(close.masters) == len(close.voids):
        return "doesn't say of every fragment how it ended"
    faults = [
        roster.fault(close, close.closed_by, number) or guest_fault(close.closed_by, roster.guests(number), "made")
        for number in range(roster.refresh() + 1)
    ]
    return None if None in faults else faults[-1]
