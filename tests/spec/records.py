"""Records as docs/protocol.md spells them: fields, bounds, and the one sequence of bytes that each may have.

Of a second reader, written from the document alone: nothing in `tests/spec` but the tests themselves imports
`composer_prime`, so that what both make of a bucket shows whether the document says enough.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Callable
from typing import Any

MAX_RECORD_BYTES = 4 * 2**20
MAX_COUNT = 2**53
PROTOCOL = 13

Check = Callable[[Any], bool]


class Unreadable(Exception):
    """These bytes aren't the record that the document describes."""


def canonical(record: Any) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def within(low: float = -math.inf, high: float = math.inf) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def real(low: float = -math.inf, high: float = math.inf, *, above: bool = False, below: bool = False) -> Check:
    def check(value: Any) -> bool:
        fits = type(value) is float and math.isfinite(value) and low <= value <= high
        return fits and not (above and value == low) and not (below and value == high)

    return check


def one_of(*words: Any) -> Check:
    return lambda value: any(type(value) is type(word) and value == word for word in words)


def maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def many(check: Check) -> Check:
    return lambda value: type(value) is list and all(check(item) for item in value)


def by_site(check: Check) -> Check:
    return lambda value: type(value) is dict and all(check(item) for item in value.values())


def fields(**checks: Check) -> Check:
    return lambda value: (
        type(value) is dict and value.keys() == checks.keys() and all(checks[key](value[key]) for key in checks)
    )


def text(value: Any) -> bool:
    return type(value) is str


def truth(value: Any) -> bool:
    return type(value) is bool


def nonce(value: Any) -> bool:
    return type(value) is str and re.fullmatch(r"[0-9a-f]{32}", value) is not None


def sha256_hex(value: Any) -> bool:
    return type(value) is str and re.fullmatch(r"[0-9a-f]{64}", value) is not None


COUNT, POSITIVE = within(0, MAX_COUNT), within(1, MAX_COUNT)

terms = fields(
    inner_steps=within(1, 10**6),
    fragments=within(1, 10**6),
    sync_delay=within(0, 10**6),
    lr=real(0, above=True),
    momentum=real(0, 1, below=True),
    codec=one_of("fp32", "bf16", "int8", "int4", "topk"),
    error_feedback=truth,
    weighting=one_of("tokens", "steps", "equal"),
    aggregate=one_of("mean", "clipped"),
    clip=real(0, above=True),
    guest_share=real(0, 0.5, above=True),
    guest_clip=real(0, above=True),
    step_tokens=maybe(POSITIVE),
    gather_sites=POSITIVE,
    slices=within(1, 1024),
    quorum=within(1, 10**6),
    grace_s=real(0, 10**6),
    liveness_s=real(0, 10**6, above=True),
    max_stale_rounds=within(1, 10**6),
    snapshot_rounds=within(1, 10**6),
    keep_log=truth,
    rounds=POSITIVE,
)


OFFER = fields(
    site=text,
    incarnation=COUNT,
    fragment=COUNT,
    version=COUNT,
    base_sha=sha256_hex,
    tokens=COUNT,
    steps=COUNT,
    trained_tokens=COUNT,
    codec=text,
    payload=maybe(text),
    sha256=maybe(sha256_hex),
    slices=text,
    nbytes=COUNT,
    norms=many(real()),
    signature=maybe(text),
)
REASONS = many(fields(site=text, why=text))
COMMIT = fields(
    fragment=COUNT,
    version=COUNT,
    base_sha=sha256_hex,
    taken=many(fields(offer=OFFER, multiplier=real())),
    refused=REASONS,
    previous=sha256_hex,
    voids=many(COUNT),
    num_parts=COUNT,
    admissions=COUNT,
    admission_sha=maybe(sha256_hex),
    committer=text,
    incarnation=COUNT,
    signature=maybe(text),
)
PART = fields(
    fragment=COUNT,
    version=COUNT,
    part=COUNT,
    commit_sha=sha256_hex,
    excluded=REASONS,
    payload=maybe(text),
    sha256=maybe(sha256_hex),
    nbytes=COUNT,
    reducer=text,
    signature=maybe(text),
)
MANIFEST = fields(
    protocol=one_of(PROTOCOL),
    run=text,
    fingerprint=sha256_hex,
    parameters=many(fields(name=text, shape=many(COUNT))),
    masters=many(sha256_hex),
    terms=terms,
    test_vector=text,
    owner=maybe(text),
    keys=by_site(text),
    created_by=text,
    nonce=nonce,
    parent=maybe(sha256_hex),
)
FOUNDING = fields(protocol=one_of(PROTOCOL), run=text, terms=terms, owner=maybe(text), keys=by_site(text))
CLOSE = fields(
    versions=many(COUNT), masters=many(sha256_hex), voids=many(many(COUNT)), closed_by=text, signature=maybe(text)
)
ADMISSION = fields(number=POSITIVE, keys=by_site(text), guests=many(text), signature=maybe(text))


def read(check: Check, data: bytes) -> dict[str, Any]:
    """The record in `data`; Unreadable where its fields, bounds or spelling aren't the document's."""
    if len(data) > MAX_RECORD_BYTES:
        raise Unreadable(f"{len(data)} bytes, at most {MAX_RECORD_BYTES}")
    try:
        record = json.loads(data.decode("ascii"))
        json.dumps(record, ensure_ascii=False).encode()  # fails on half of a surrogate pair
        same = canonical(record) == data
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no canonical JSON: {error}") from error
    if not check(record):
        raise Unreadable("a field is missing, unknown, of another type or out of bounds")
    if not same:
        raise Unreadable("spelled in another way than canonically")
    return record


def unbase64(value: str, num_bytes: int) -> bytes | None:
    """The bytes behind base64 in its one spelling, or None."""
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if len(data) == num_bytes and base64.b64encode(data).decode() == value else None
