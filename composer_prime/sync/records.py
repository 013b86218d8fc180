"""The records a run leaves in its bucket, as frozen pydantic models; see docs/protocol.md for who writes which when.

Payloads and masters are binary and live in `outer/`.
"""

import math
from typing import Annotated, Literal

from pydantic import Field

from composer_prime.sync.canonical import Count, Positive, Record, Signed
from composer_prime.sync.terms import Terms

Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

SiteState = Literal["joining", "live", "done", "leaving"]


class ParameterShape(Record):
    """One trainable parameter as the run knows it."""

    name: str
    shape: tuple[Count, ...]


class Manifest(Record):
    """What a run is: created once, before anything else but the first masters."""

    one_form = True

    protocol: Count
    run: str
    fingerprint: str
    """sha256 of the trainable parameters' names and shapes."""
    parameters: tuple[ParameterShape, ...]
    masters: tuple[Sha256, ...]
    """sha256 of master(f, 0) for every fragment."""
    terms: Terms
    test_vector: str
    """What the run's arithmetic gives on fixed input; a machine that differs may not take part."""
    owner: str | None = None
    """Public key that may admit and revoke; None: a run without keys."""
    keys: dict[str, str] = Field(default_factory=dict)
    """Public key by site name, admitted from the start; empty and no owner: whoever can write may take part."""
    created_by: str
    nonce: Nonce
    """Drawn by its creator, so that two runs of equal recipes are two."""
    parent: Sha256 | None = None
    """sha256 of the manifest of the run whose last masters were the first ones of this; None: of no run."""


class Offer(Signed):
    """One site's coded pseudo-gradient for round `version` of `fragment`, or the word that it has none."""

    site: str
    incarnation: Count
    fragment: Count
    version: Count
    base_sha: Sha256
    """sha256 of master(fragment, version), on which this offer stands."""
    tokens: Count
    """Tokens trained behind this movement."""
    steps: Count
    trained_tokens: Count
    """All tokens this site ever trained this fragment on, at capture."""
    codec: str
    payload: str | None
    """Key of the payload; None says: this site has no movement to offer, don't wait for it."""
    sha256: Sha256 | None
    """Root of the slices' hashes (`outer.slices`)."""
    slices: str = ""
    """The slices' hashes (`outer.slices.slice_digest`), base64; so a slice can be checked alone."""
    nbytes: Count
    norms: tuple[float, ...] = ()
    """L2 norm of each slice as it decodes."""

    def is_at(self, site: str, fragment: int, version: int) -> bool:
        """Whether it is the record of that key: a signed one may have been copied from elsewhere."""
        return (self.site, self.fragment, self.version) == (site, fragment, version)

    @property
    def norm(self) -> float:
        """L2 norm of the whole movement as it decodes, the same double on every machine."""
        squares = 0.0
        for norm in self.norms:  # sum() compensates from Python 3.12 on, and pow() differs between C libraries
            squares += norm * norm
        return math.sqrt(squares)


class Taken(Record):
    """An offer that a commit merges. The record itself is in the commit, so that nobody can change it afterwards."""

    offer: Offer
    multiplier: float
    """The final fp32 factor of this payload."""

    @property
    def site(self) -> str:
        """The site that made the offer."""
        return self.offer.site

    @property
    def incarnation(self) -> int:
        """The incarnation that made it."""
        return self.offer.incarnation

    @property
    def payload(self) -> str:
        """Key of the payload; '' in an unsound record."""
        return self.offer.payload or ""

    @property
    def sha256(self) -> str:
        """Root of the slices' hashes; '' in an unsound record."""
        return self.offer.sha256 or ""

    @property
    def tokens(self) -> int:
        """Tokens trained behind the movement."""
        return self.offer.tokens

    @property
    def trained_tokens(self) -> int:
        """All tokens the site had ever trained this fragment on, at the capture."""
        return self.offer.trained_tokens


MAX_REASON = 300
"""Characters of a reason: it may quote what a stranger wrote, and a record that is too long counts for nothing."""


class Refused(Record):
    """An offer that a commit, or one part of it, leaves out, and why."""

    site: str
    why: str


class Commit(Signed):
    """The one record that closes round `version` of `fragment`."""

    fragment: Count
    version: Count
    base_sha: Sha256
    taken: tuple[Taken, ...]
    """Sorted by site. Empty: a void round, the next master is the same."""
    refused: tuple[Refused, ...]
    previous: Sha256
    """sha256 of the bytes of commit(fragment, version - 1); of the manifest for version 0."""
    voids: tuple[Count, ...] = ()
    """Which of the last `max_stale_rounds` commits don't follow from manifest and offers, and so took nothing."""
    num_parts: Count
    """Parts in which the offers taken are merged, each by one site; 0: every site merges all for itself."""
    admissions: Count = 0
    """The last admission record that this commit honours; 0: those of the manifest."""
    admission_sha: Sha256 | None = None
    """sha256 of that record's bytes; None for 0. Nobody can name a record that the owner has yet to write."""
    committer: str
    incarnation: Count

    def is_at(self, fragment: int, version: int) -> bool:
        """Whether it is the record of that key."""
        return (self.fragment, self.version) == (fragment, version)


class Part(Signed):
    """Create-once: one part of a sliced round as merged by its reducer. Without a payload it is a zero part."""

    fragment: Count
    version: Count
    part: Count
    commit_sha: Sha256
    excluded: tuple[Refused, ...]
    """Offers that the commit takes and whose bytes in this part are unsound."""
    payload: str | None
    sha256: Sha256 | None
    nbytes: Count
    reducer: str


class Claim(Signed):
    """Create-once: this process is incarnation `incarnation` of `site`."""

    site: str
    incarnation: Count
    nonce: str
    host: str
    pid: Count


class Beat(Signed):
    """The only key that is overwritten: a site's sign of life."""

    site: str
    incarnation: Count
    counter: Count
    state: SiteState
    versions: tuple[Count, ...]
    """Next round of each fragment, as this site knows it."""
    inner_step: Count
    trained_tokens: Count
    """All tokens this site has trained; what a crash loses is counted from it."""
    pins: tuple[Count, ...]
    """Oldest version of each fragment that this site may still need."""


class Close(Signed):
    """Create-once: the final versions. The run is over; one that goes on is a new run."""

    versions: tuple[Count, ...]
    masters: tuple[Sha256, ...]
    voids: tuple[tuple[Count, ...], ...]
    """Of each fragment, which of the last `max_stale_rounds` commits were void: a later commit would say so."""
    closed_by: str


class Admission(Signed):
    """Create-once, owner-signed: the keys admitted, by site, from now on, and the guests."""

    number: Positive
    keys: dict[str, str]
    """Public key by site name; the whole list, so that a site left out is revoked."""
    guests: tuple[str, ...] = ()
    """Sites admitted that may offer and never commit, merge a part or close the run; sorted."""


class Invited(Signed):
    """Create-once, owner-signed: who was invited, and until when. What was admitted stands in the admissions."""

    site: str
    number: Positive
    public: str
    guest: bool
    expires_at: Count
    """Unix seconds from which on the site doesn't come in any more, if it hasn't until then."""
