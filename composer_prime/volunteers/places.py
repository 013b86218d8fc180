"""Where an invitation may lead: to buckets and servers of the internet, and to nothing of the volunteer's own.

By spelling alone, since looking a name up would already ask somebody: a public name that leads to a private address
isn't noticed here.
"""

import re
from urllib.parse import urlsplit

from composer_prime.errors import InvitationRefused
from composer_prime.store.redirects import is_public
from composer_prime.volunteers.invitation import Invitation, check_signature

BUCKETS = ("s3", "gs", "hf")
GATEWAYS = {"gateway+https": "https", "gateway+http": "http"}
FOLDERS = ("", "file", "memory")
"""Schemes of what lies on this machine; '' is a plain path."""
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
MOST_CHARACTERS = 1000

_URL = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._~%=+-]*)*")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9=+_-][A-Za-z0-9=+._-]*)+")


def is_url(url: str) -> bool:
    """Whether it is http(s)://host, with a port and a path or without, and nothing else: no user, query or escape."""
    if len(url) > MOST_CHARACTERS or not _URL.fullmatch(url):
        return False
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_public_url(url: str) -> bool:
    """Whether it is a URL whose host is nobody's own machine or network, as it is spelled."""
    return is_url(url) and is_public(urlsplit(url).hostname or "")


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
    if len(uri) > MOST_CHARACTERS:
        raise _malformed("its place", uri, f"at most {MOST_CHARACTERS} characters")
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
