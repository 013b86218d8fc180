"""An invitation held against where it leads and the run there: who signed it, whether it holds, and the name is free.

It may lead to buckets and servers of the internet, and to nothing of the volunteer's own, by spelling alone: looking a
name up would already ask somebody, so a public name that leads to a private address isn't noticed here.

Everything is looked up before anything starts, and each refusal is one line.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from composer_prime.errors import ConfigError, InvitationRefused, SiteRevoked
from composer_prime.gateway.store import KEY_VARIABLE
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.lifetime import find_manifest, has_ended
from composer_prime.sync.members import check_name_is_free
from composer_prime.sync.records import Manifest
from composer_prime.sync.roster import Roster
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.terms import Terms
from composer_prime.volunteers.consent import Wishes
from composer_prime.volunteers.invitation import (
    MOST_URL_CHARACTERS,
    Invitation,
    adopt_environment,
    check_signature,
    is_public_url,
    is_url,
    restored,
)

BUCKETS = ("s3", "gs", "hf")
GATEWAYS = {"gateway+https": "https", "gateway+http": "http"}
FOLDERS = ("", "file", "memory")
"""Schemes of what lies on this machine; '' is a plain path."""
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9=+_-][A-Za-z0-9=+._-]*)+")
BEATS_WATCHED = 2.5 / 5
"""Share of the liveness time in which a site that lives beats twice."""


@dataclass(frozen=True)
class Entrance:
    """A run that lets this site in.

    site          by what name
    terms         with the rounds that the run goes on to
    num_sites     that ever came, this one counted
    is_finished   whether the run has ended, so that there is nothing to do in it
    """

    site: str
    manifest: Manifest
    terms: Terms
    num_sites: int
    is_finished: bool = False


@contextmanager
def reached(invitation: Invitation, wishes: Wishes, *, may_be_over: bool = False) -> Iterator[Store]:
    """Open the store that an invitation leads to, as the volunteer allows.

    may_be_over   whether one that has expired will do, and the site's key is needed by a gateway alone

    Raises InvitationRefused in one line; nothing was asked of anybody then.
    """
    check_place(invitation, allow_local=wishes.allow_local)
    if not may_be_over:
        check_date(invitation, time.time())
    needs_key = not may_be_over or invitation.uri.startswith("gateway+")
    key = own_key(invitation, wishes.key_file) if needs_key else None
    adopt_environment(invitation, use_my_aws=wishes.use_my_aws)
    with nullcontext() if key is None else _lent(key), closing(open_store(invitation.uri)) as store:
        yield store


def check_place(invitation: Invitation, *, allow_local: bool) -> None:
    """Raise InvitationRefused unless it is signed and leads where it may, before anything there is opened.

    allow_local   the volunteer's word that folders and addresses of their own are meant
    """
    check_signature(invitation)
    _check_uri(invitation.uri, invitation.run, allow_local)
    for name in ENDPOINTS:
        if (url := invitation.environment.get(name)) is not None:
            if not is_url(url):
                raise _malformed(name, url, "http(s)://host")
            _check_local(f"{name} = {url}", is_public_url(url), allow_local)


def _check_uri(uri: str, run: str, allow_local: bool) -> None:
    if len(uri) > MOST_URL_CHARACTERS:
        raise _malformed("its place", uri, f"at most {MOST_URL_CHARACTERS} characters")
    scheme, separator, rest = uri.partition("://")
    scheme, rest = (scheme, rest) if separator else ("", uri)
    if scheme in GATEWAYS:
        url = f"{GATEWAYS[scheme]}://{rest}"
        is_sound, is_local = is_url(url), not is_public_url(url)
    elif scheme in BUCKETS:
        is_sound, is_local = bool(_BUCKET.fullmatch(rest)), False
    else:
        is_sound, is_local = scheme in FOLDERS and uri.isprintable(), True
    if not is_sound or not rest.endswith(f"/{run}"):
        raise _malformed("its place", uri, f"a bucket, gateway or folder that ends with /{run}")
    _check_local(uri, not is_local, allow_local)


def _check_local(place: str, is_public: bool, allow_local: bool) -> None:
    if not is_public and not allow_local:
        raise InvitationRefused(
            f"the invitation leads to {place}, on this machine or its network: add --allow-local if you know that the "
            "run is there, else ask the run's owner"
        )


def _malformed(name: str, value: str, limit: str) -> InvitationRefused:
    return InvitationRefused(
        f"the invitation gives {ascii(value)[:120]} as {name}, which must be {limit}: ask the run's owner for an "
        "invitation that this version's `composer-prime invite` wrote"
    )


def check_date(invitation: Invitation, now: float) -> None:
    """Raise InvitationRefused when the invitation's time is over, by this machine's clock."""
    if now >= invitation.expires_at:
        raise InvitationRefused(
            f"the invitation of {invitation.site} to run {invitation.run} expired at {utc(invitation.expires_at)}: ask "
            "the run's owner for another one"
        )


def own_key(invitation: Invitation, key_file: Path | None) -> SigningKey:
    """The site's key: the invitation's, or the file of a volunteer who made it. Raises InvitationRefused."""
    if (key := invitation.key()) is not None:
        return key
    if key_file is None:
        raise InvitationRefused(
            f"the invitation of {invitation.site} is for a key that you made ({invitation.public}): name its file "
            "with --key"
        )
    key = SigningKey.load(key_file)
    if key.public != invitation.public:
        raise InvitationRefused(
            f"{key_file} holds the key {key.public}, and {invitation.public} is invited: name that key's file"
        )
    return key


@contextmanager
def _lent(key: SigningKey) -> Iterator[None]:
    """Let stores that are opened meanwhile ask a gateway by this key, which lies in a file that goes again."""
    with tempfile.TemporaryDirectory(prefix="composer-prime-key-") as scratch, restored((KEY_VARIABLE,)):
        file = Path(scratch) / "site.key"
        key.save(file)
        os.environ[KEY_VARIABLE] = str(file)
        yield


def check_origin(invitation: Invitation, store: Store, key: SigningKey | None = None) -> tuple[Manifest, Roster]:
    """The run that the invitation is to, whose owner signed it. Raises InvitationRefused; BadInput without a run."""
    manifest, sha = find_manifest(store)
    if sha != invitation.manifest_sha256 or manifest.run != invitation.run:
        raise InvitationRefused(
            f"the invitation is to another run than the one at {store.uri}, which is {manifest.run} with the manifest "
            f"{sha[:16]}, and not {invitation.run} with {invitation.manifest_sha256[:16]}: ask for another invitation"
        )
    roster = Roster(store, manifest, sha, key)
    fault = "can't be judged: the run has no owner" if manifest.owner is None else roster.owner_fault(invitation)
    if fault is not None:
        raise InvitationRefused(
            f"the invitation is forged or was changed: it {fault}. Use it for nothing, and ask the run's owner"
        )
    return manifest, roster


def enter(invitation: Invitation, store: Store, key: SigningKey, *, starting: bool = True) -> Entrance:
    """Hold the invitation against its run.

    starting   whether the site shall start now, so that its name must be free

    Raises InvitationRefused when it is forged, revoked, or of another run; when the name is taken, after watching the
    beat of its last process for a moment; and BadInput when there is no run, or no store.
    """
    revoked = InvitationRefused(
        f"the invitation of {invitation.site} to run {invitation.run} was revoked: its key is no longer admitted; "
        "ask the run's owner"
    )
    try:
        manifest, roster = check_origin(invitation, store, key)
    except SiteRevoked:  # a gateway says so
        raise revoked from None
    roster.refresh()
    if roster.admitted().get(invitation.site) != key.public:
        raise revoked
    terms = manifest.terms
    is_finished = has_ended(store, roster, terms)
    if starting and not is_finished:
        _check_name(invitation, store, roster, terms)
    claimed = {keys.parse_claim(key)[0] for key in store.list(keys.sites_prefix()) if keys.is_claim(key)}
    return Entrance(invitation.site, manifest, terms, len(claimed | {invitation.site}), is_finished)


def _check_name(invitation: Invitation, store: Store, roster: Roster, terms: Terms) -> None:
    runtime = ThreadRuntime()
    try:
        check_name_is_free(store, runtime, invitation.site, roster, BEATS_WATCHED * terms.liveness_s)
    except ConfigError:
        raise InvitationRefused(
            f"site {invitation.site} runs already, here or elsewhere: stop that process first, or ask the run's owner "
            "for an invitation of another name"
        ) from None
    finally:
        runtime.close()


def utc(unix_s: float) -> str:
    """A moment for people."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
