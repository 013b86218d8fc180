"""What a member behind a gateway may do, from the names and sizes alone: pure, no I/O.

It reads the run. It writes its own offers, payloads, claims and tape, each once, and its own beat; it deletes nothing,
and it neither commits nor reduces: those records decide for everybody, and stay with the owner's sites.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from composer_prime.gateway.wire import INLINE_BYTES, MISSING, NOT_ADMITTED, REVOKED
from composer_prime.store import keys
from composer_prime.store.base import is_key
from composer_prime.sync.terms import Terms

Operation = Literal["read", "create", "put", "delete"]

HIDDEN = {"probe"}
"""Kinds that aren't read either. Tapes are: they hold counts, names and reasons, no text of prompts or rollouts."""
BULK = {"payload", "merged payload", "master"}
"""Kinds whose bytes go between site and bucket, by ticket; the others are records, which come through the gateway."""
WRITTEN: Mapping[str, tuple[frozenset[str], int]] = {
    "offer": (frozenset({"create"}), INLINE_BYTES),
    "claim": (frozenset({"create"}), 2**12),
    "tape": (frozenset({"create"}), INLINE_BYTES),
    "beat": (frozenset({"put"}), 2**16),
    "payload": (frozenset({"create", "put"}), 0),
}
"""Kinds that a member writes: how, and at most how many bytes; a payload's size is its fragment's."""
PAYLOADS_A_ROUND = 4
"""Payloads that one site may store for one round of one fragment. One is due; restarts may bring others."""


STATUS = {
    "malformed": 400, "unknown": 401, "replayed": 401, NOT_ADMITTED: 401, REVOKED: 401, "forbidden": 403, MISSING: 404,
    "run": 404, "method": 405, "length": 411, "large": 413, "busy": 429, "bucket": 502,
}  # fmt: skip


class Refusal(Exception):
    """Ends the handling of one request: an HTTP status, a word for programs, a line for people."""

    def __init__(self, code: str, text: str, *, status: int = 0, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.status = status or STATUS[code]
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class RunFacts:
    """What there is to know of a run from its manifest, and the most bytes that an object may have."""

    run: str
    terms: Terms
    bounds: tuple[tuple[int, int], ...]
    """By fragment: the least and the most bytes of a payload."""
    max_object_bytes: int


def read_refusal(key: str) -> str | None:
    """Why a member may not read what stands at `key`; None when it may."""
    place = keys.place(key) if is_key(key) else None
    if place is None or place.kind in HIDDEN:
        return f"{key[:80]!r} names nothing that a member of a run reads"
    return None


def write_refusal(site: str, operation: Operation, key: str, nbytes: int, facts: RunFacts) -> str | None:
    """Why `site` may not write (or delete) so many bytes at `key`; None when it may."""
    place = keys.place(key) if is_key(key) else None
    if place is None:
        return f"{key[:80]!r} is no key of an object of a run: spell keys as composer_prime.store.keys does"
    if operation == "delete":
        return f"{key}: a member behind a gateway deletes nothing"
    if place.kind not in WRITTEN:
        return f"{key} is a {place.kind}: a member behind a gateway writes its own offers, payloads, claims, tape, beat"
    if place.site != site:
        return f"{key} is site {place.site}'s: this key is site {site}'s, which writes under its own name only"
    operations, most = WRITTEN[place.kind]
    if operation not in operations:
        how = "written once: create it" if operations == {"create"} else "overwritten: put it"
        return f"{key} is a {place.kind}, which is {how}"
    if place.kind in ("offer", "payload") and place.fragment >= len(facts.bounds):
        return f"{key} is of fragment {place.fragment}, run {facts.run} has {len(facts.bounds)}"
    if place.kind == "payload":
        return _payload_refusal(key, nbytes, facts.bounds[place.fragment], facts)
    if nbytes > most:
        return f"{key} has {nbytes} bytes, a {place.kind} at most {most}"
    return None


def _payload_refusal(key: str, nbytes: int, bounds: tuple[int, int], facts: RunFacts) -> str | None:
    least, most = bounds
    if not least <= nbytes <= most:
        return f"{key} has {nbytes} bytes, {facts.terms.codec} of this fragment has {least} to {most}"
    if nbytes > facts.max_object_bytes:
        return f"{key} has {nbytes} bytes, this gateway takes at most {facts.max_object_bytes} (--max-object-mib)"
    return None


def is_bulk(key: str) -> bool:
    """Whether the bytes at `key` go between site and bucket."""
    place = keys.place(key)
    return place is not None and place.kind in BULK


def is_written_once(key: str) -> bool:
    """Whether nothing may be overwritten at `key`."""
    place = keys.place(key)
    return place is None or place.kind != "beat"
