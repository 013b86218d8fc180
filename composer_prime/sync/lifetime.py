"""A run from its manifest to its end, as far as records alone tell: no torch, so that any command may look.

How long it goes on is the manifest's word and that of the reopenings after it; where it ended, a close record's.
"""

import json

from composer_prime.errors import BadInput, KeyMissing, ProtocolError
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import PROTOCOL, sha256_hex
from composer_prime.sync.reading import find_record, read_bytes
from composer_prime.sync.records import Close, Manifest, Reopening
from composer_prime.sync.roster import Roster
from composer_prime.sync.terms import Terms


def read_manifest(data: bytes) -> Manifest:
    """Parse a manifest's bytes. Raises ProtocolError when it speaks another version, CorruptObject when it is none."""
    try:
        protocol = json.loads(data).get("protocol")
    except (ValueError, AttributeError, RecursionError):
        protocol = PROTOCOL  # no JSON object at all: the record's own parser says so
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"{keys.manifest()} speaks protocol {protocol}, this composer-prime speaks {PROTOCOL}: "
            "install the version the run was created with"
        )
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


def prolonged(store: Store, roster: Roster, terms: Terms) -> tuple[Terms, tuple[int, ...]]:
    """The terms with the rounds that the last sound reopening sets, and the version at which each close record ends
    the run, by its number: the first one's, and one for every record of a reopening."""
    ends = [terms.final_version]
    while True:
        number = len(ends)
        key = keys.reopening(number)
        try:
            store.get_range(key, 0, 1)
        except KeyMissing:
            return terms, tuple(ends)
        record = find_record(store, Reopening, key)
        if record is not None and record.number == number and roster.owner_fault(record) is None:
            terms = terms.model_copy(update={"rounds": max(terms.rounds, record.rounds)})
        ends.append(terms.final_version)


def find_close(store: Store, roster: Roster, number: int, end: int) -> Close | None:
    """The close record of that number where it is sound; None where there is none.

    end   the version at which it ends the run (`prolonged`)
    """
    close = find_record(store, Close, keys.close(number))
    return None if close is None or close_fault(roster, close, number, end) is not None else close


def has_ended(store: Store, roster: Roster, fragments: int, ends: tuple[int, ...]) -> bool:
    """Whether a run is over: the close record stands, and every fragment has had all its rounds. A close record alone
    says nothing, since any member may put one at any time."""
    if find_close(store, roster, len(ends) - 1, ends[-1]) is None:
        return False
    for fragment in range(fragments):
        there = set(store.list(keys.rounds_prefix(fragment)))
        if not all(keys.commit(fragment, version) in there for version in range(ends[-1])):
            return False
    return True


def close_fault(roster: Roster, close: Close, number: int, end: int) -> str | None:
    """Why what stands as the close record of that number, which ends the run at version `end`, isn't one of the run's
    end that its site signed; None when it is.

    It names no admission record, and its site may have been revoked since: any list that admits it will do.
    """
    if close.number != number or set(close.versions) != {end}:
        return f"isn't of closing {number}, in which every fragment ends at version {end}"
    if len({len(close.versions), len(close.masters), len(close.voids), len(close.floors)}) != 1:
        return "doesn't say of every fragment how it ended"
    faults = [
        roster.fault(close, close.closed_by, number) or roster.authority(number).fault(close.closed_by, "made")
        for number in range(roster.refresh() + 1)
    ]
    return None if None in faults else faults[-1]
