"""The records a run leaves in its bucket, as frozen pydantic models with one canonical encoding.

Canonical (sorted keys, no spaces) because records are hashed: a commit names the sha256 of the one before it, and two
processes that write the same record write the same bytes. Payloads and masters are binary and live in `outer/`.
"""

import hashlib
import json
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_prime.errors import CorruptObject

PROTOCOL = 1
"""Version of the objects and rules in the bucket; a site refuses a run of another one."""

SiteState = Literal["joining", "live", "done", "leaving"]


def sha256_hex(data: bytes) -> str:
    """The sha256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


class Record(BaseModel):
    """Base of every record: frozen, strict about unknown fields, canonical as bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """This record as canonical JSON (UTF-8, sorted keys, no white space)."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Self:
        """Parse what stands at `key`. Raises CorruptObject, naming the key, when it isn't such a record."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "record"
            raise CorruptObject(f"{key} is no {cls.__name__}: {where}: {first['msg']}") from error


class ParameterShape(Record):
    """One trainable parameter as the run knows it."""

    name: str
    shape: tuple[int, ...]


class Terms(Record):
    """What every site of a run agrees on, since it changes bits or the pace of all. Part of the manifest."""

    inner_steps: int = Field(ge=1)
    """H: inner steps between two offers of the same fragment."""
    fragments: int = Field(ge=1)
    """P: fragments the model is cut into."""
    sync_delay: int = Field(ge=0)
    """tau: inner steps a round may take before the training thread waits for it."""
    merge_alpha: float = Field(ge=0, le=1)
    """alpha: how much of the local value the blend keeps; 0 is the exact rule."""
    lr: float = Field(gt=0)
    """Outer learning rate."""
    momentum: float = Field(ge=0, lt=1)
    """Outer Nesterov momentum."""
    codec: str
    """Codec of the payloads."""
    weighting: Literal["tokens", "equal"]
    """How the offers of a round are weighted against each other."""
    quorum: int = Field(ge=1)
    """Valid offers without which no round merges anything."""
    grace_s: float = Field(ge=0)
    """Seconds, from the quorum-th valid offer, that a round waits for the other live sites."""
    liveness_s: float = Field(gt=0)
    """Seconds without a new beat after which a site isn't waited for."""
    max_stale_rounds: int = Field(ge=1)
    """Rounds a site may miss with an offer out before its carried work is dropped."""
    snapshot_rounds: int = Field(ge=1)
    """K: rounds between two snapshots of a master."""
    rounds: int = Field(ge=1)
    """Training rounds of every fragment, after which the run ends for all sites. One closing round follows."""

    @property
    def final_version(self) -> int:
        """The version at which every master is finished: the training rounds and the closing one."""
        return self.rounds + 1

    @property
    def steps_per_turn(self) -> int:
        """Inner steps from one due step to the next: H / P."""
        return self.inner_steps // self.fragments


class Manifest(Record):
    """What a run is: created once, before anything else but the first masters."""

    protocol: int
    run: str
    fingerprint: str
    """sha256 of the trainable parameters' names and shapes."""
    parameters: tuple[ParameterShape, ...]
    masters: tuple[str, ...]
    """sha256 of master(f, 0) for every fragment."""
    terms: Terms
    test_vector: str
    """What the run's arithmetic gives on fixed input; a machine that differs may not take part."""
    created_by: str


class Offer(Record):
    """One site's coded pseudo-gradient for round `version` of `fragment`, or the word that it has none."""

    site: str
    incarnation: int = Field(ge=0)
    fragment: int = Field(ge=0)
    version: int = Field(ge=0)
    base_sha: str
    """sha256 of master(fragment, version), on which this offer stands."""
    tokens: int = Field(ge=0)
    """Tokens trained behind this movement."""
    steps: int = Field(ge=0)
    trained_tokens: int = Field(ge=0)
    """All tokens this site ever trained this fragment on, at capture."""
    codec: str
    payload: str | None
    """Key of the payload; None says: this site has no movement to offer, don't wait for it."""
    sha256: str | None
    nbytes: int = Field(ge=0)
    norm: float = Field(ge=0)
    """L2 norm of the movement before coding."""


class Taken(Record):
    """An offer that a commit merges."""

    site: str
    incarnation: int
    payload: str
    sha256: str
    tokens: int
    multiplier: float
    """The final fp32 factor of this payload in the weighted mean."""


class Refused(Record):
    """An offer that a commit leaves out, and why."""

    site: str
    why: str


class Commit(Record):
    """The one record that closes round `version` of `fragment`."""

    fragment: int = Field(ge=0)
    version: int = Field(ge=0)
    base_sha: str
    taken: tuple[Taken, ...]
    """Sorted by site. Empty: a void round, the next master is the same."""
    refused: tuple[Refused, ...]
    previous: str
    """sha256 of the bytes of commit(fragment, version - 1); of the manifest for version 0."""
    committer: str
    incarnation: int


class Claim(Record):
    """Create-once: this process is incarnation `incarnation` of `site`."""

    site: str
    incarnation: int = Field(ge=0)
    nonce: str
    host: str
    pid: int


class Beat(Record):
    """The only key that is overwritten: a site's sign of life."""

    site: str
    incarnation: int
    counter: int
    state: SiteState
    versions: tuple[int, ...]
    """Next round of each fragment, as this site knows it."""
    inner_step: int
    trained_tokens: int
    """All tokens this site has trained; what a crash loses is counted from it."""
    pins: tuple[int, ...] = ()
    """Oldest version of each fragment that this site may still need; empty: nothing is pinned."""


class Close(Record):
    """Create-once: the final versions; later commits are invalid."""

    versions: tuple[int, ...]
    masters: tuple[str, ...]
    closed_by: str
