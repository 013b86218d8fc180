"""What one site has given to a run, from the run's bucket alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_prime.errors import BadInput
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Beat
from composer_prime.visible import size
from composer_prime.volunteers.consent import Wishes
from composer_prime.volunteers.entrance import check_origin, reached
from composer_prime.volunteers.invitation import Invitation
from composer_prime.volunteers.shared_recipe import read_shared
from composer_prime.watch.records import SiteStatus
from composer_prime.watch.status import BEATS_PER_LIVENESS, look


@dataclass(frozen=True, kw_only=True)
class Contribution(SiteStatus):
    """One site's part. A guest's tokens and hours are claims, which count up to what members did.

    share    of all tokens that the run has merged
    hours    it was there, by its beats
    starts   processes of its name
    """

    run: str
    share: float
    hours: float
    starts: int


def contribution(store: Store, site: str) -> Contribution:
    """What `site` has given to the run in `store`. Raises BadInput when it never came, or when no run is there."""
    keys.check_site_name(site)
    status = look(store)
    found = next((each for each in status.sites if each.site == site), None)
    if found is None:
        came = ", ".join(each.site for each in status.sites) or "nobody"
        remedy = "wait until it has started, or correct the name"
        raise BadInput(f"site {site} never came to run {status.run}; {came} did: {remedy}")
    merged = sum(each.merged_tokens for each in status.sites)
    return Contribution(
        **vars(found),
        run=status.run,
        share=found.merged_tokens / merged if merged else 0.0,
        hours=_hours(store, status.sites, found),
        starts=found.incarnations,
    )


def contribution_of(invitation: Invitation, wishes: Wishes) -> Contribution:
    """What the invited site has given, from where the invitation leads. It may have expired, or be revoked.

    Raises InvitationRefused when the invitation is forged or of another run, or holds what none may; else as
    `contribution`.
    """
    with reached(invitation, wishes, may_be_over=True) as store:
        check_origin(invitation, store)
        read_shared(invitation.recipe)
        return contribution(store, invitation.site)


def lines(found: Contribution) -> Iterator[str]:
    """The contribution as a person reads it."""
    starts = "1 start" if found.starts == 1 else f"{found.starts} starts"
    yield f"site {found.site} in run {found.run}: {found.state}, {found.hours:.1f} h in {starts}"
    said = "claimed, of which count no more than its members trained meanwhile" if found.guest else "trained"
    yield (
        f"{found.trained_tokens:,} tokens {said}: {found.merged_tokens:,} merged ({found.share:.1%} of the run's), "
        f"{found.carried_tokens:,} carried, {found.dropped_tokens:,} dropped"
    )
    yield f"rounds: {found.rounds_taken} taken, {found.rounds_missed} missed"
    yield f"{size(found.bytes_up)} sent, {size(found.bytes_down)} fetched, as its own tape says"


def _hours(store: Store, sites: Sequence[SiteStatus], found: SiteStatus) -> float:
    """Beats come at a fixed pace, each process counts its own. A guest's count up to those of the members' longest."""
    manifest, _ = find_manifest(store)

    def counted(site: str) -> int:
        beats = [find_record(store, Beat, key) for key in store.list(keys.site_prefix(site)) if keys.is_beat(key)]
        return sum(beat.counter for beat in beats if beat is not None)

    beats = counted(found.site)
    if found.guest:
        beats = min(beats, max((counted(each.site) for each in sites if not each.guest), default=0))
    return beats * manifest.terms.liveness_s / BEATS_PER_LIVENESS / 3600
