"""Ed25519 keys and signatures as docs/protocol.md restricts them, and the owner's records."""

import hashlib
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tests.spec import records
from tests.spec.records import PROTOCOL, Unreadable, canonical, unbase64

_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@cache
def public_key(spelled: str) -> bytes | None:
    """The 32 bytes of `ed25519:...`, or None for a key that verifies nothing."""
    kind, _, rest = spelled.partition(":")
    raw = unbase64(rest, 32)
    if kind != "ed25519" or raw is None:
        return None
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    return None if y >= _P or _has_small_order(y) else raw


def _has_small_order(y: int) -> bool:
    """True when eight times the point is the neutral one; neither sign of x changes that."""
    x_squared = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    for _ in range(3):  # (x, y) doubled: y' = (y^2 + x^2) / (1 - d x^2 y^2), x' = 2 x y / (1 + d x^2 y^2)
        across = _D * x_squared * y * y % _P
        doubled_y = (y * y + x_squared) * pow(1 - across, -1, _P) % _P
        x_squared = 4 * x_squared * y * y * pow(1 + across, -2, _P) % _P
        y = doubled_y
    return x_squared == 0 and y == 1


def verifies(key: str | None, kind: str, manifest_sha: str, record: dict[str, Any]) -> bool:
    """Whether `record` carries the signature of `key`'s holder."""
    raw = None if key is None else public_key(key)
    signature = unbase64(record["signature"] or "", 64)
    if raw is None or signature is None:
        return False
    unsigned = {name: value for name, value in record.items() if name != "signature"}
    message = f"composer-prime/{PROTOCOL}/{kind}/{manifest_sha}\n".encode() + canonical(unsigned)
    try:
        Ed25519PublicKey.from_public_bytes(raw).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Admission:
    """Who may do what from one owner's record on."""

    number: int
    sha: str | None
    """Of the record's bytes; None for the manifest's own list."""
    sound: bool
    keys: dict[str, str]
    guests: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Members:
    """Keys and ranks in one run."""

    manifest_sha: str
    owner: str | None
    has_keys: bool
    admissions: list[Admission]

    def signed(self, admission: Admission, site: str, kind: str, record: dict[str, Any]) -> bool:
        if not self.has_keys:
            return True
        return verifies(admission.keys.get(site), kind, self.manifest_sha, record)

    def may_close(self, admission: Admission, site: str, kind: str, record: dict[str, Any]) -> bool:
        """Whether `record` is by `site`, and `site` one that may commit, merge parts and close the run."""
        return site not in admission.guests and self.signed(admission, site, kind, record)

    def is_owners(self, kind: str, record: dict[str, Any]) -> bool:
        return not self.has_keys or verifies(self.owner, kind, self.manifest_sha, record)


def read_members(manifest: dict[str, Any], manifest_sha: str, admissions: list[bytes]) -> Members:
    """Members by the manifest and the bytes of the records `admissions/0001.json` and on."""
    has_keys = manifest["owner"] is not None or bool(manifest["keys"])
    standing = Admission(0, None, True, manifest["keys"])
    members = Members(manifest_sha, manifest["owner"], has_keys, [standing])
    for number, data in enumerate(admissions, start=1):
        record = _sound(members, records.ADMISSION, "Admission", number, data)
        if record is None:
            standing = Admission(number, sha256(data), False, standing.keys, standing.guests)
        else:
            guests = frozenset(record["guests"])
            standing = Admission(number, sha256(data), True, record["keys"], guests)
        members.admissions.append(standing)
    return members


def _sound(members: Members, check: records.Check, kind: str, number: int, data: bytes) -> dict[str, Any] | None:
    try:
        record = records.read(check, data)
    except Unreadable:
        return None
    return record if record["number"] == number and members.is_owners(kind, record) else None
