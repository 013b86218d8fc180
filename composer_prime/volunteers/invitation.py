"""An invitation: all that a volunteer needs to take part in one run, in one line of text, signed by the run's owner.

It may hold secrets (the site's private key, scoped credentials of the bucket), so its text forms hide them, and files
that hold one are open to their owner alone. Another record, without secrets, tells the bucket who was invited.
"""

import base64
import binascii
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import zstandard
from pydantic import Field, ValidationError

from composer_prime.config.table import RunName, SiteName
from composer_prime.errors import InvitationRefused
from composer_prime.gateway.client import is_public
from composer_prime.redaction import SECRET_NAMES_VARIABLE
from composer_prime.store.remote import ANONYMOUS_VARIABLE
from composer_prime.sync.canonical import Signed
from composer_prime.sync.signatures import SigningKey, verify

PREFIX = "cpinv1."
MAX_JSON_BYTES = 2**20
MAX_TEXT_CHARACTERS = 2**20
SEED_BYTES = 32
LAST_DATE_S = 253_402_300_799
"""The last second of the year 9999, after which a date has no spelling."""

CREDENTIALS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_REGION",
)  # fmt: skip
"""Variables that an invitation may set on the volunteer's machine. No others: some would run programs there."""

WORD, REGION = re.compile(r"[!-~]{1,4096}"), re.compile(r"[A-Za-z0-9-]{1,63}")

IDENTITY = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN",
    "AWS_PROFILE", "AWS_DEFAULT_PROFILE",
)  # fmt: skip
"""Variables that say who asks: an invitation that sets one replaces them all."""
KEYED = ("s3://", "hf://")
"""Stores that know who asks by the variables of an invitation."""


MOST_URL_CHARACTERS = 1000
_URL = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._~%=+-]*)*")


def is_url(url: str) -> bool:
    """Whether it is http(s)://host, with a port and a path or without, and nothing else: no user, query or escape."""
    if len(url) > MOST_URL_CHARACTERS or not _URL.fullmatch(url):
        return False
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_public_url(url: str) -> bool:
    """Whether it is a URL whose host is nobody's own machine or network, as it is spelled."""
    return is_url(url) and is_public(urlsplit(url).hostname or "")


class Invitation(Signed):
    """One site's way into one run. Its names become paths on the volunteer's machine, so they hold no path."""

    version: Literal[2] = 2
    run: RunName
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the run's manifest: another run of that name is another run."""
    owner: str
    """Public key of the run's owner, who signed this: looked at before anybody is asked for the run."""
    uri: str
    """The run's root in its bucket, or its gateway."""
    site: SiteName
    number: int = Field(ge=1)
    """How often this site was invited, this time counted."""
    public: str = Field(pattern=r"^ed25519:[A-Za-z0-9+/]{43}=$")
    """The site's key, which the owner has admitted."""
    seed: str | None = Field(default=None, repr=False)
    """Its private half, base64; None: the volunteer made the key."""
    guest: bool = False
    """Whether the site neither commits nor merges for others."""
    expires_at: int = Field(ge=0, le=LAST_DATE_S)
    """Unix seconds from which on nothing may be started by it."""
    recipe: str
    """TOML."""
    environment: dict[str, str] = Field(default_factory=dict, repr=False)
    """Of CREDENTIALS: what the store needs."""

    def key(self) -> SigningKey | None:
        """The private key in it; None when the volunteer has it. Raises InvitationRefused when it isn't `public`'s."""
        if self.seed is None:
            return None
        try:
            key = SigningKey.from_bytes(base64.b64decode(self.seed, validate=True))
        except (ValueError, binascii.Error):
            raise InvitationRefused("the invitation's key is damaged: ask for another one") from None
        if key.public != self.public:
            raise InvitationRefused("the invitation's key isn't the one it names: ask for another one")
        return key


def encode(invitation: Invitation) -> str:
    """The invitation as one line that can be pasted anywhere."""
    packed = zstandard.ZstdCompressor(level=19).compress(invitation.to_bytes())
    return PREFIX + base64.urlsafe_b64encode(packed).decode("ascii")


def decode(text: str) -> Invitation:
    """The invitation that such a line spells, its signature not looked at yet. Raises InvitationRefused."""
    text = "".join(text.split())  # mail programs break lines
    if not text.startswith(PREFIX) or len(text) > MAX_TEXT_CHARACTERS:
        raise InvitationRefused(
            f"this is no invitation: one is a line that starts with {PREFIX}; copy it whole, or give its file"
        )
    damaged = InvitationRefused(
        "the invitation is damaged, or of another version: copy it again, or ask for another one"
    )
    try:
        packed = base64.b64decode(text.removeprefix(PREFIX).encode(), altchars=b"-_", validate=True)
        if not 0 <= zstandard.frame_content_size(packed) <= MAX_JSON_BYTES:
            raise damaged
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_JSON_BYTES)
        found = Invitation.model_validate_json(data)
    except (ValueError, zstandard.ZstdError, ValidationError):
        raise damaged from None
    check_environment(found.environment)
    return found


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise InvitationRefused unless every variable is one that an invitation may set, to words that one may have."""
    others = sorted(set(environment) - set(CREDENTIALS))
    if others:
        raise InvitationRefused(
            f"an invitation may not set {', '.join(map(_shown, others))[:200]}: only {', '.join(CREDENTIALS)}, which a "
            "bucket needs"
        )
    for name, value in environment.items():
        if not (REGION if name.endswith("REGION") else WORD).fullmatch(value):
            raise InvitationRefused(
                f"an invitation may set {name} to one word in ASCII alone (a region: to letters, digits and -): ask "
                "the run's owner for another one"
            )


def _shown(name: str) -> str:
    return name if re.fullmatch(r"\w{1,60}", name, re.ASCII) else ascii(name[:60])


def check_signature(invitation: Invitation) -> None:
    """Raise InvitationRefused unless the owner that it names signed it. Whether the run is theirs its manifest says."""
    message = invitation.message(invitation.manifest_sha256)
    if not verify(invitation.owner, message, invitation.signature or ""):
        raise InvitationRefused(
            f"the invitation is forged or was changed: {ascii(invitation.owner)[:80]}, whom it names as the run's "
            "owner, hasn't signed it. Use it for nothing, and ask the run's owner"
        )


@contextmanager
def restored(names: Iterable[str]) -> Iterator[None]:
    """Give these variables back the values that they have now, or none, at the block's end."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def adopt_environment(invitation: Invitation, *, use_my_aws: bool = False) -> None:
    """Let this process, and those it starts, reach the store as the invitation says, and not write its keys down.

    use_my_aws   sign with what this machine's user has. Without, the invitation's keys sign, or requests are anonymous
    """
    given = {name: value for name, value in invitation.environment.items() if not use_my_aws or name not in IDENTITY}
    secret = [name for name in given if name in IDENTITY]
    if secret:
        for name in IDENTITY:
            os.environ.pop(name, None)
    os.environ.update(given)
    if invitation.uri.startswith((*KEYED, "gs://")):
        has_keys = invitation.uri.startswith(KEYED) and {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= given.keys()
        os.environ[ANONYMOUS_VARIABLE] = "0" if use_my_aws or has_keys else "1"
    named = [name for name in os.environ.get(SECRET_NAMES_VARIABLE, "").split(",") if name]
    if secret:
        os.environ[SECRET_NAMES_VARIABLE] = ",".join(dict.fromkeys([*named, *secret]))


def is_invitation(source: str) -> bool:
    """Whether a command line names an invitation, in one of the three ways, and not something else."""
    if source == "-" or source.startswith(PREFIX):
        return True
    try:
        with Path(source).expanduser().open("rb") as file:
            return file.read(len(PREFIX)) == PREFIX.encode()
    except OSError:
        return False


def read_invitation(source: str, stdin: str | None = None) -> Invitation:
    """The invitation that a command line names: a file, the line itself, or "-" for what came on stdin.

    Raises InvitationRefused, also when others of this machine may read the file.
    """
    if source == "-":
        return decode(stdin or "")
    if source.startswith(PREFIX):
        return decode(source)
    path = Path(source).expanduser()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_TEXT_CHARACTERS + 1)
    except FileNotFoundError:
        raise InvitationRefused(
            f"invitation {path} doesn't exist: correct the path, or paste the line itself"
        ) from None
    except OSError as error:
        raise InvitationRefused(f"invitation {path} can't be read ({error.strerror}): correct the path") from None
    found = decode(data.decode("utf-8", errors="replace"))
    if (found.seed or found.environment) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvitationRefused(
            f"invitation {path} holds secrets and is open to other users of this machine (mode "
            f"{stat.S_IMODE(mode):04o}): run `chmod 600 {path}`"
        )
    return found


def write_invitation(invitation: Invitation, path: Path) -> None:
    """Write the line into a new file of mode 0600. Raises InvitationRefused when anything is there already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvitationRefused(f"{path} exists and is not overwritten: choose another file with --out") from None
    except OSError as error:
        raise InvitationRefused(f"{path} can't be written ({error.strerror}): choose another file with --out") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(encode(invitation) + "\n")
