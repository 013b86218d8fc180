"""The host's side: the run's owner invites a volunteer, and sees who was invited.

Inviting is three acts: a key is admitted, a record of it is left in the bucket, and the invitation is written. The file
comes first and goes again if the bucket refuses, so that no key is admitted that nobody holds.
"""

import base64
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from composer_prime.config.recipe import RecipeBase
from composer_prime.errors import BadInput, ConfigError
from composer_prime.gateway import invitation_keys
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.founding import changed_terms
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.members import PRESENT
from composer_prime.sync.owner import Owner
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Claim, Invited, Manifest
from composer_prime.sync.roster import Roster
from composer_prime.sync.signatures import SigningKey, check_public, verify
from composer_prime.sync.terms import terms_of
from composer_prime.volunteers.entrance import BEATS_WATCHED
from composer_prime.volunteers.invitation import SEED_BYTES, Invitation, check_environment, write_invitation
from composer_prime.volunteers.shared_recipe import shared_toml
from composer_prime.watch.status import look

UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
LONGEST_S = 366 * UNITS_S["d"]
GATEWAY = "gateway+"


@dataclass(frozen=True)
class Invitee:
    """Who is invited, and how.

    public       the volunteer's own key; None: one is made, and travels in the invitation
    guest        whether the site neither commits nor merges for others, and weighs little
    uri          where the volunteer finds the run, where that isn't where the owner does: a gateway
    environment  variables that reach the store: scoped credentials, endpoint, region
    """

    site: str
    expires_at: int
    public: str | None = None
    guest: bool = True
    uri: str | None = None
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Standing:
    """An invitation as the bucket tells of it.

    state     "holds", "expired" (and what was admitted still is), "replaced" by a later one, or "revoked"
    starts    processes that its key ever started
    presence  of its site, for people: live, leaving, silent or done, and its round when it was last seen; '' where it
              never came, and where a later invitation counts
    """

    site: str
    number: int
    expires_at: int
    guest: bool
    state: str
    starts: int
    presence: str = ""


def parse_expiry(text: str, now: float) -> int:
    """Unix seconds at which "30m", "12h", "7d" or "2w" from now have passed. Raises BadInput."""
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    length_s = 0 if match is None else int(match[1]) * UNITS_S[match[2]]
    if not 0 < length_s <= LONGEST_S:
        raise BadInput(f"--expires ({text}) must be from 1m to 366d: write 12h, 7d or 2w")
    return int(now) + length_s


def invite(
    store: Store, key: SigningKey, invitee: Invitee, recipe: RecipeBase, out: Path, allowed: Collection[str] = ()
) -> Invitation:
    """Admit a site, write its invitation into the new file `out`, and return it. `key` is the owner's.

    allowed   terms by which one site could ruin the run and which the owner accepts, see `owner.check_guarded`

    Raises BadInput when the run has no owner or another one, or such terms, when the name is taken, when guests would
    be the majority, when a member shall come by a gateway, or when the recipe isn't the run's; nothing is changed then.
    """
    keys.check_site_name(invitee.site)
    environment = dict(invitee.environment or {})
    check_environment(environment)
    manifest, sha = find_manifest(store)
    if manifest.owner is None:
        raise BadInput(
            f"run {manifest.run} has no owner, so nobody can sign an invitation: create a run with outer.owner "
            "(`composer-prime keygen owner.key` prints the key), or give volunteers the recipe and the bucket"
        )
    owner = Owner(store, key)
    owner.check_open(allowed, guest=invitee.guest)
    roster = Roster(store, manifest, sha, key)
    roster.refresh()
    if invitee.site in roster.admitted():
        raise BadInput(
            f"site {invitee.site} is admitted already: invite another name, or revoke that one first "
            f"(`composer-prime revoke {store.uri} --site {invitee.site} --key OWNER.KEY`)"
        )
    _check_recipe(recipe, manifest)
    uri = store.uri if invitee.uri is None else _checked_gateway(invitee.uri)
    if uri.startswith(GATEWAY) and not invitee.guest:
        raise BadInput(
            f"site {invitee.site} would close rounds as any member does, and behind a gateway nobody may: invite a "
            "guest (--guest), or leave --gateway out and give credentials of the bucket"
        )
    if uri.rstrip("/").rpartition("/")[2] != manifest.run:
        raise BadInput(f"{uri} must end with the run's name, /{manifest.run}: give the run's own folder, or gateway")
    seed = os.urandom(SEED_BYTES) if invitee.public is None else None  # else the volunteer has it
    public = SigningKey.from_bytes(seed).public if seed is not None else check_public(invitee.public or "")
    number = len(store.list(invitation_keys.invitations_of(invitee.site))) + 1
    both = {"site": invitee.site, "number": number, "public": public}
    both |= {"guest": invitee.guest, "expires_at": invitee.expires_at}
    invitation = Invitation(
        **both,
        run=manifest.run,
        manifest_sha256=sha,
        owner=key.public,
        uri=uri.rstrip("/"),
        seed=None if seed is None else base64.b64encode(seed).decode("ascii"),
        recipe=shared_toml(recipe),
        environment=environment,
    )
    invitation = roster.sign(invitation)
    write_invitation(invitation, out)
    try:
        owner.admit(invitee.site, public, guest=invitee.guest)
    except BaseException:
        out.unlink()
        raise
    store.create(invitation_keys.invitation(invitee.site, number), roster.sign(Invited(**both)).to_bytes())
    return invitation


def standings(store: Store, now: float, wait: Callable[[float], object] = time.sleep) -> list[Standing]:
    """All invitations of the run in `store`, by site and number. Raises BadInput when no run is there.

    wait   is called between two looks at the beats of sites that say that they live
    """
    manifest, sha = find_manifest(store)
    roster = Roster(store, manifest, sha)
    roster.refresh()
    told = filter(invitation_keys.is_invitation, store.list(invitation_keys.invitations_prefix()))
    signed = (find_record(store, Invited, key) for key in told)
    records = [record for record in signed if record is not None and roster.owner_fault(record) is None]
    newest = {record.site: record.number for record in records}  # keys sort by number
    presences = _presences(store, manifest.terms.liveness_s, wait) if records else {}
    found = []
    for record in records:
        starts = _starts(store, record, sha)
        if record.number < newest[record.site]:
            state = "replaced"
        elif roster.admitted().get(record.site) != record.public:
            state = "revoked"
        else:
            state = "holds" if now < record.expires_at else "expired"
        presence = presences.get(record.site, "") if starts and state != "replaced" else ""
        found.append(Standing(record.site, record.number, record.expires_at, record.guest, state, starts, presence))
    return found


def expired_unused(store: Store, now: float) -> list[str]:
    """Sites that are admitted still, by an invitation that expired before they ever came. BadInput without a run."""
    found = standings(store, now, wait=lambda seconds: None)
    return [each.site for each in found if each.state == "expired" and not each.starts]


def _starts(store: Store, record: Invited, run_sha: str) -> int:
    """How many claims of the site its invited key signed: an earlier invitation of the name had another one."""
    found = [find_record(store, Claim, key) for key in store.list(keys.site_prefix(record.site)) if keys.is_claim(key)]
    signed = [claim for claim in found if claim is not None and claim.signature is not None]
    return sum(verify(record.public, claim.message(run_sha), claim.signature or "") for claim in signed)


def _presences(store: Store, liveness_s: float, wait: Callable[[float], object]) -> dict[str, str]:
    """What each site that ever came is doing, by two looks where one tells too little."""
    status = look(store)
    if any(site.state in PRESENT for site in status.sites):
        status = look(store, BEATS_WATCHED * liveness_s, wait)
    found = {}
    for site in status.sites:
        state = "silent" if site.state in PRESENT and site.beating is False else site.state
        seen = f", last seen in round {min(site.versions)} of {status.rounds}" if site.versions else ""
        found[site.site] = state if state in (*PRESENT, "done") else f"{state}{seen}"
    return found


def gateway_warning(uri: str) -> str | None:
    """What the host should know of a gateway's address: whether volunteers would reach it without TLS."""
    host = urlsplit(uri.removeprefix(GATEWAY)).hostname or ""
    if uri.startswith(f"{GATEWAY}https://") or host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host):
        return None
    return f"{uri} is reached without TLS: whoever is on the way reads presigned URLs; write {GATEWAY}https://"


def _checked_gateway(uri: str) -> str:
    if uri.startswith((f"{GATEWAY}https://", f"{GATEWAY}http://")):
        return uri
    remedy = f"{GATEWAY}{uri}" if uri.startswith(("https://", "http://")) else f"{GATEWAY}https://HOST/RUN"
    raise BadInput(f"--gateway ({uri}) isn't how a gateway's address is written: write {remedy}")


def _check_recipe(recipe: RecipeBase, manifest: Manifest) -> None:
    """Raise ConfigError when the recipe's sites would not fit the run."""
    if recipe.run.name != manifest.run:
        raise ConfigError(f"run.name ({recipe.run.name}) isn't the run's ({manifest.run}): give the run's own recipe")
    differences = changed_terms(manifest.terms, terms_of(recipe))
    if differences:
        raise ConfigError(f"this recipe differs from run {manifest.run}: {differences}; give the run's own recipe")
