"""One canonical encoding for every record in the bucket, and signatures over it.

Canonical (sorted keys, no spaces) because records are hashed: a commit names the sha256 of the one before it, and two
processes that write the same record write the same bytes.
"""

import hashlib
import json
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_prime.errors import CorruptObject

PROTOCOL = 13
"""Version of the objects and rules in the bucket; a site refuses a run of another one."""

MAX_RECORD_BYTES = 4 * 2**20
"""Largest record that is read; a bigger one is corrupt, whatever it says."""

MAX_COUNT = 2**53
"""Largest integer that a record may say: every language has it, and sums and means of such are numbers still."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def sha256_hex(data: bytes) -> str:
    """The sha256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no white space, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Record(BaseModel):
    """Base of every record: frozen, strict about unknown fields, canonical as bytes."""

    one_form: ClassVar[bool] = False
    """Whether it is read in its canonical bytes only: records by which sites judge each other are."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """This record as canonical JSON."""
        return canonical(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Self:
        """Parse what stands at `key`. Raises CorruptObject, naming the key, when it isn't such a record."""
        if len(data) > MAX_RECORD_BYTES:
            raise CorruptObject(f"{key} has {len(data)} bytes, a record at most {MAX_RECORD_BYTES}: it is not read")
        try:
            record = cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = (
                ascii(".".join(str(part) for part in first["loc"]))[1:-1][:200] or "record"
            )  # a key may be its writer's
            raise CorruptObject(f"{key} is no {cls.__name__}: {where}: {first['msg']}") from error
        if cls.one_form and record.to_bytes() != data:  # else a JSON parser's leniency would decide what it says
            raise CorruptObject(f"{key} holds a {cls.__name__} in other bytes than its canonical ones: it is not read")
        return record


class Signed(Record):
    """A record that carries its writer's signature when the run admits keys."""

    one_form = True

    signature: str | None = None
    """ed25519 over `message`, base64; None in a run without keys."""

    def message(self, run_sha: str) -> bytes:
        """What is signed: the record without its signature, bound to its kind, the protocol and the run's manifest."""
        head = f"composer-prime/{PROTOCOL}/{type(self).__name__}/{run_sha}\n"
        return head.encode() + canonical(self.model_dump(mode="json", exclude={"signature"}))
