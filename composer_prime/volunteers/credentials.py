"""Which variables travel in an invitation, so that the volunteer's machine reaches the bucket: read where the host is.

Endpoint and region come along by themselves; keys only when the owner names them, and what these may write is tried.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from composer_prime.errors import BadInput, StoreError, StoreUnusable
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.store.remote import ANONYMOUS_VARIABLE
from composer_prime.sync.reading import read_bytes
from composer_prime.volunteers.invitation import (
    IDENTITY,
    KEYED,
    Invitation,
    adopt_environment,
    check_environment,
    restored,
)  # fmt: skip

PLACES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_REGION")
"""Not secret, and the same for everybody."""
POLICIES = "infra/bucket"


def read_credentials(
    file: Path | None, names: str | None, gateway: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables of an invitation.

    file      lines NAME=VALUE; empty ones and comments are passed over
    names     of variables in `environ`, with commas
    gateway   the gateway that is named instead of the bucket: then nothing of the bucket travels

    Raises BadInput for a name that isn't set, a line that is none, or a variable that no bucket needs.
    """
    given = _read_file(file) if file is not None else {}
    for name in filter(None, (part.strip() for part in (names or "").split(","))):
        if not environ.get(name):
            raise BadInput(f"--credentials-env names {name}, which isn't set here: set it, or leave it out")
        given[name] = environ[name]
    if gateway is not None:
        if given:
            raise BadInput(
                "with --gateway the bucket's keys stay with you: leave --credentials and --credentials-env out"
            )
        return {}
    check_environment(given)
    return {name: environ[name] for name in PLACES if environ.get(name)} | given


def rights_warnings(invitation: Invitation) -> Iterator[str]:
    """What the owner should know of the keys that travel in an invitation; they are tried, and nothing is changed."""
    if invitation.environment.keys() <= set(PLACES):
        return
    if not invitation.guest:
        yield (
            f"site {invitation.site} is a member, and a member's credentials can void every round: give them to "
            f"machines that you trust, or invite a guest (leave --member out) with {POLICIES}/guest-policy.json"
        )
    if not invitation.uri.startswith(KEYED):
        return
    with restored({*IDENTITY, ANONYMOUS_VARIABLE, *invitation.environment}):
        adopt_environment(invitation)  # as the volunteer will reach it
        with closing(open_store(invitation.uri)) as store:
            try:
                fault = rights_fault(store, guest=invitation.guest)
            except (StoreError, StoreUnusable) as error:
                fault = f"the credentials that travel couldn't be tried from here: {error}"
    if fault is not None:
        yield fault


def rights_fault(store: Store, *, guest: bool) -> str | None:
    """What a site's credentials may write in a run and shouldn't; None where nothing was found.

    store   opened with them

    Tried by creating again what is there, byte for byte: who may do so is told that it is there, and nothing changes.
    Raises StoreError when the run can't be read with them, StoreUnusable at first contact.
    """
    scope = f"Scope them to the site, by {POLICIES}/{'guest' if guest else 'site'}-policy.json"
    for key, whose in (
        (max(store.list(keys.admissions_prefix()), default=""), "only the run's owner does, who can spoil the run"),
        (keys.manifest() if guest else "", "a member does, who can void every round"),
    ):
        if key and _may_write(store, key):
            return f"the credentials that travel may write {key}, as {whose}. {scope}"
    return None


def _may_write(store: Store, key: str) -> bool:
    data = read_bytes(store, key)
    try:
        store.create(key, data)
    except StoreError:  # refused: they have just read it, so it isn't the network
        return False
    return True


def _read_file(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--credentials {path} can't be read ({error}): give a file of NAME=VALUE lines") from None
    found = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        name, separator, value = text.partition("=")
        if not separator:
            raise BadInput(f"--credentials {path} line {number} isn't NAME=VALUE: correct it")
        found[name.strip()] = value.strip().strip("'\"")
    return found
