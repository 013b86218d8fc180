"""Where every object of a run lies. Launches, invitations and torchft spell theirs beside what writes them.

Keys are relative to the run's root in the bucket. Numbers have a fixed width, so that names sort as numbers do,
and every function here is pure; docs/protocol.md says what each object holds.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from composer_prime.config.table import SITE_NAME
from composer_prime.errors import ConfigError, ProtocolError

FRAGMENT_DIGITS = 4
ROUND_DIGITS = 8
INCARNATION_DIGITS = 6
TAPE_DIGITS = 8
ORDER_DIGITS = 4
PART_DIGITS = 4
SHA_DIGITS = 16

_SHA = re.compile(rf"[0-9a-f]{{{SHA_DIGITS},64}}")
_F, _SHA16 = rf"(?P<fragment>\d{{{FRAGMENT_DIGITS}}})", rf"(?P<sha>[0-9a-f]{{{SHA_DIGITS}}})"
_NAME, _ROUND = rf"(?P<site>{SITE_NAME})", rf"rounds/{_F}/(?P<number>\d{{{ROUND_DIGITS}}})"
_INCARNATION = rf"sites/{_NAME}/(?P<number>\d{{{INCARNATION_DIGITS}}})"
_KINDS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "manifest": r"manifest\.json",
        "founding": r"founding\.json",
        "close": r"close\.json",
        "admission": rf"admissions/(?P<number>\d{{{ORDER_DIGITS}}})\.json",
        "probe": rf"probe/(?:{SITE_NAME}/)?[^/]+",
        "offer": rf"{_ROUND}/offers/{_NAME}\.json",
        "payload": rf"{_ROUND}/payload/{_NAME}-{_SHA16}",
        "commit": rf"{_ROUND}/commit\.json",
        "part": rf"{_ROUND}/merged/\d{{{PART_DIGITS}}}\.json",
        "merged payload": rf"{_ROUND}/merged/\d{{{PART_DIGITS}}}-{_SHA16}",
        "master": rf"masters/{_F}/(?P<number>\d{{{ROUND_DIGITS}}})-{_SHA16}",
        "claim": rf"{_INCARNATION}/claim\.json",
        "beat": rf"{_INCARNATION}/beat",
        "tape": rf"tape/{_NAME}/(?P<number>\d{{{TAPE_DIGITS}}})-{_SHA16}\.jsonl",
    }.items()
}

# A site spells and reads the same few keys with every look at the bucket, many times a second.
_remembered = lru_cache(maxsize=4096)


class Place(NamedTuple):
    """What stands at a key: its kind, and the names and numbers in it where the kind has them."""

    kind: str
    site: str = ""
    fragment: int = 0
    number: int = 0
    """Version, incarnation, or the number of a tape's piece or of an admission."""
    sha: str = ""


@_remembered
def place(key: str) -> Place | None:
    """What stands at `key`, for whoever must judge keys that others name; None for a key that no run of sites has."""
    for kind, pattern in _KINDS.items():
        if match := pattern.fullmatch(key):
            found = match.groupdict()
            numbers = {name: int(found.get(name) or 0) for name in ("fragment", "number")}
            return Place(kind, found.get("site") or "", **numbers, sha=found.get("sha") or "")
    return None


def _parsed(kind: str, key: str) -> Place:
    found = place(key)
    if found is None or found.kind != kind:
        a = "an" if kind == "offer" else "a"
        raise ProtocolError(f"key ({key!r}) does not name {a} {kind}: pass a key that this module spelled")
    return found


def _told(kind: str) -> Callable[[str], bool]:
    return lambda key: (found := place(key)) is not None and found.kind == kind


is_offer, is_payload, is_master, is_claim, is_beat = map(_told, ("offer", "payload", "master", "claim", "beat"))
"""Each: whether a key is that of such an object."""


def offer_site(key: str) -> str:
    """The site that made the offer record at `key`; ProtocolError when it is no such key."""
    return _parsed("offer", key).site


def parse_payload(key: str) -> tuple[int, int, str]:
    """(fragment, version it was captured on, site) of a payload's key; ProtocolError for any other key."""
    _, site, fragment, version, _ = _parsed("payload", key)
    return fragment, version, site


def parse_master(key: str) -> tuple[int, int, str]:
    """(fragment, version, first 16 hex digits of the sha256) of a snapshot's key; ProtocolError for any other key."""
    return _parsed("master", key)[2:]


def parse_claim(key: str) -> tuple[str, int]:
    """(site, incarnation) of a claim's key; ProtocolError for any other key."""
    _, site, _, incarnation, _ = _parsed("claim", key)
    return site, incarnation


def parse_collectable(key: str) -> tuple[int, int] | None:
    """(fragment, version) of an offer, a payload or a merged part, which may be deleted one day; None for others."""
    found = place(key)
    if found is None or found.kind not in ("offer", "payload", "part", "merged payload"):
        return None
    return found.fragment, found.number


@_remembered
def check_site_name(site: str) -> str:
    """Return `site` when it is a legal site name; ConfigError says what a name may hold."""
    if not re.fullmatch(SITE_NAME, site):
        raise ConfigError(
            f"site.name ({site!r}) must be 1 to 32 lower-case letters, digits or hyphens and not start with a hyphen: "
            "pick a name such as 'a' or 'site-1'"
        )
    return site


def fixed_number(what: str, value: int, digits: int) -> str:
    """A number as keys hold it. Raises ProtocolError, saying what it counts, when it has more digits."""
    if not 0 <= value < 10**digits:
        raise ProtocolError(f"{what} ({value}) must be from 0 to {10**digits - 1}, or names would no longer sort")
    return f"{value:0{digits}d}"


def short_sha(sha: str) -> str:
    """The digits of a hash that keys hold."""
    if not _SHA.fullmatch(sha):
        raise ProtocolError(f"sha256 ({sha!r}) must be {SHA_DIGITS} to 64 lower-case hex digits")
    return sha[:SHA_DIGITS]


def manifest() -> str:
    """The create-once record of everything that changes bits."""
    return "manifest.json"


def founding() -> str:
    """The create-once record of what a run shall be, from which its first site writes the manifest."""
    return "founding.json"


def close() -> str:
    """The create-once record of the run's final versions."""
    return "close.json"


def admissions_prefix() -> str:
    """Prefix of all records that admit or revoke keys; they sort by number."""
    return "admissions/"


def admission(number: int) -> str:
    """The create-once, owner-signed record of the `number`-th change, from 1, of who may take part."""
    return f"{admissions_prefix()}{fixed_number('admission', number, ORDER_DIGITS)}.json"


def probe(nonce: str, site: str | None = None) -> str:
    """A throw-away object with which a store is tried, by a site or by somebody; `nonce` is fresh for every try."""
    return f"probe/{nonce}" if site is None else f"probe/{check_site_name(site)}/{nonce}"


def rounds_prefix(fragment: int) -> str:
    """Prefix of all rounds of one fragment; they sort by version."""
    return f"rounds/{fixed_number('fragment', fragment, FRAGMENT_DIGITS)}/"


@_remembered
def round_prefix(fragment: int, version: int) -> str:
    """Prefix of everything that belongs to the round which makes `version` + 1 out of `version`."""
    return f"{rounds_prefix(fragment)}{fixed_number('version', version, ROUND_DIGITS)}/"


def offers_prefix(fragment: int, version: int) -> str:
    """Prefix of the round's offer records, and of nothing else."""
    return f"{round_prefix(fragment, version)}offers/"


@_remembered
def offer(fragment: int, version: int, site: str) -> str:
    """One site's offer record for one round."""
    return f"{offers_prefix(fragment, version)}{check_site_name(site)}.json"


def payloads_prefix(fragment: int, version: int, site: str) -> str:
    """Prefix of one site's payloads of one round, and of those of sites whose names go on behind a hyphen."""
    return f"{round_prefix(fragment, version)}payload/{check_site_name(site)}-"


def payload(fragment: int, version: int, site: str, sha: str) -> str:
    """The coded pseudo-gradient an offer names, addressed by the sha256 (hex) of its bytes."""
    return f"{payloads_prefix(fragment, version, site)}{short_sha(sha)}"


@_remembered
def commit(fragment: int, version: int) -> str:
    """The create-once record that decides which offers make the round."""
    return f"{round_prefix(fragment, version)}commit.json"


def merged(fragment: int, version: int, part: int) -> str:
    """The create-once record of one part of a sliced round, as its reducer merged it."""
    return f"{round_prefix(fragment, version)}merged/{fixed_number('part', part, PART_DIGITS)}.json"


def merged_payload(fragment: int, version: int, part: int, sha: str) -> str:
    """The coded mean of one part of a sliced round, addressed by the sha256 (hex) of its bytes."""
    return f"{merged(fragment, version, part).removesuffix('.json')}-{short_sha(sha)}"


def masters_prefix(fragment: int) -> str:
    """Prefix of all snapshots of one fragment; they sort by version."""
    return f"masters/{fixed_number('fragment', fragment, FRAGMENT_DIGITS)}/"


def master(fragment: int, version: int, sha: str) -> str:
    """A snapshot of a fragment's master, addressed by the sha256 (hex) of its bytes."""
    return f"{masters_prefix(fragment)}{fixed_number('version', version, ROUND_DIGITS)}-{short_sha(sha)}"


def sites_prefix() -> str:
    """Prefix of all claims and beats of all sites."""
    return "sites/"


def site_prefix(site: str) -> str:
    """Prefix of one site's claims and beats; they sort by incarnation."""
    return f"{sites_prefix()}{check_site_name(site)}/"


@_remembered
def claim(site: str, incarnation: int) -> str:
    """The create-once record by which a process takes a site's name."""
    return f"{site_prefix(site)}{fixed_number('incarnation', incarnation, INCARNATION_DIGITS)}/claim.json"


@_remembered
def beat(site: str, incarnation: int) -> str:
    """The one object of a site that is overwritten: its sign of life."""
    return f"{site_prefix(site)}{fixed_number('incarnation', incarnation, INCARNATION_DIGITS)}/beat"


def tape_prefix(site: str) -> str:
    """Prefix of one site's tape; its objects sort by number."""
    return f"tape/{check_site_name(site)}/"


def tape(site: str, number: int, sha: str) -> str:
    """The `number`-th piece of a site's tape of metrics and events (JSON lines), addressed by its sha256 (hex)."""
    return f"{tape_prefix(site)}{fixed_number('tape number', number, TAPE_DIGITS)}-{short_sha(sha)}.jsonl"
