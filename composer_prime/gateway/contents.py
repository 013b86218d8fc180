"""What a member's objects must hold: the records it signs, and payloads that are what their names say. Pure, no I/O.

A presigned URL lets no one look at what is written, so records come through the gateway, and payloads are looked at
before an offer may name them.
"""

import json
from collections.abc import Callable, Iterator

from composer_prime.errors import CorruptObject
from composer_prime.gateway.policy import RunFacts
from composer_prime.outer.slices import root_sha256, slice_digest
from composer_prime.store.keys import Place
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.records import Beat, Claim, Offer
from composer_prime.sync.roster import Roster
from composer_prime.sync.validity import offer_fault

READ_BYTES = 16 * 2**20
"""Of a payload that are held at once."""


def parse_offer(key: str, place: Place, data: bytes, facts: RunFacts, roster: Roster) -> Offer | str:
    """The offer, or why no reader would take it. Which master it stands on, and what was taken, only readers judge."""
    try:
        offer = Offer.from_bytes(data, key)
    except CorruptObject as error:
        return str(error)
    fault = offer_fault(
        offer,
        site=place.site,
        facts=facts.fragments[place.fragment].facts,
        version=place.number,
        base_sha=offer.base_sha,
        taken={},
        terms=facts.terms,
    )
    fault = fault or roster.fault(offer, place.site)
    return offer if fault is None else f"{key}: {fault}"


def claim_fault(key: str, place: Place, data: bytes, roster: Roster) -> str | None:
    """Why this isn't the claim that `key` says; None when it is."""
    try:
        claim = Claim.from_bytes(data, key)
    except CorruptObject as error:
        return str(error)
    if (claim.site, claim.incarnation) != (place.site, place.number):
        return f"{key}: the record claims {claim.site}/{claim.incarnation}"
    return _named(key, roster.fault(claim, place.site))


def beat_fault(
    key: str, place: Place, data: bytes, previous: bytes | None, facts: RunFacts, roster: Roster
) -> str | None:
    """Why this isn't the beat that comes after `previous`, the one that stands there; None when it is."""
    try:
        beat = Beat.from_bytes(data, key)
    except CorruptObject as error:
        return str(error)
    if (beat.site, beat.incarnation) != (place.site, place.number):
        return f"{key}: the record is of {beat.site}/{beat.incarnation}"
    if not len(beat.versions) == len(beat.pins) == len(facts.fragments):
        return f"{key}: {len(beat.versions)} versions and {len(beat.pins)} pins, the run has {len(facts.fragments)}"
    if previous not in (None, data):
        try:
            counter = Beat.from_bytes(previous, key).counter
        except CorruptObject:
            counter = -1  # what isn't sound may be replaced
        if beat.counter <= counter:
            return f"{key}: counts {beat.counter}, the beat that stands there {counter}: an old one, sent again"
    return _named(key, roster.fault(beat, place.site))


def tape_fault(key: str, place: Place, data: bytes) -> str | None:
    """Why this is no piece of that site's tape; None when it is: JSON lines that name the site, under their hash."""
    if not (sha := sha256_hex(data)).startswith(place.sha):
        return f"{key} holds bytes whose hash is {sha[: len(place.sha)]}"
    try:
        events = [json.loads(line) for line in data.decode().splitlines()]
        sites = {event["site"] for event in events}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{key} is no tape, which is events as JSON lines: {error!r}"
    return None if sites == {place.site} else f"{key} holds events of {sorted(map(str, sites)) or 'nobody'}"


def payload_fault(
    key: str, place: Place, nbytes: int, read: Callable[[int, int], bytes], facts: RunFacts
) -> str | None:
    """Why a payload's bytes aren't those that its key is the hash of; None when they are.

    read   bytes of the payload, from an offset and of a length
    """
    slices = facts.fragments[place.fragment].slices or (nbytes,)
    if sum(slices) != nbytes:
        return f"{key} has {nbytes} bytes, its slices have {sum(slices)}"
    digests = []
    for start, sizes in _runs(slices):
        piece = memoryview(read(start, sum(sizes)))
        for size in sizes:
            digests.append(slice_digest(piece[:size]))
            piece = piece[size:]
    root = root_sha256(digests)
    return None if root.startswith(place.sha) else f"{key} holds bytes whose hash is {root[: len(place.sha)]}"


def _runs(slices: tuple[int, ...]) -> Iterator[tuple[int, list[int]]]:
    """(offset, sizes) of neighbouring slices that are read at once."""
    start, sizes = 0, []
    for size in slices:
        if sizes and sum(sizes) + size > READ_BYTES:
            yield start, sizes
            start, sizes = start + sum(sizes), []
        sizes.append(size)
    yield start, sizes


def _named(key: str, fault: str | None) -> str | None:
    return None if fault is None else f"{key}: {fault}"
