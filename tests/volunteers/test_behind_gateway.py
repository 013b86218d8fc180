"""A volunteer whose invitation leads to a gateway: the check, the start, and what the site is handed."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from composer_prime.config.paths import run_uri
from composer_prime.config.recipe import RecipeBase
from composer_prime.errors import InvitationRefused, StoreUnusable
from composer_prime.store import keys, open_store
from composer_prime.sync.owner import Owner
from composer_prime.volunteers.contribution import contribution, contribution_of
from composer_prime.volunteers.invitation import Invitation, encode, read_invitation
from composer_prime.volunteers.join import join
from tests.gateway.guarded import Guarded, guarding
from tests.volunteers.owned_run import OWNER, OwnedRun, come, consenting


@pytest.fixture
def gateway(run: OwnedRun) -> Iterator[Guarded]:
    with guarding(run.store) as running:
        yield running


def invited(run: OwnedRun, gateway: Guarded) -> Invitation:
    """As the volunteer reads it."""
    made = run.invite(uri=f"gateway+{gateway.root}/run", guest=True)
    return read_invitation(encode(made))


def test_a_volunteer_whose_clock_is_late_is_refused_by_the_gateway_s(
    run: OwnedRun, gateway: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    invitation = read_invitation(encode(run.invite(uri=f"gateway+{gateway.root}/run", guest=True, expires_at=1000)))
    with pytest.raises(InvitationRefused, match="expired at 1970-01-01 00:16 UTC: ask"):
        join(invitation, consenting(run), lambda line: None, lambda *args: 1)
    monkeypatch.setattr("composer_prime.volunteers.entrance.check_date", lambda *args: None)

    def claim(recipe: RecipeBase, site: str, resume: bool) -> int:
        with closing(open_store(run_uri(recipe) or "")) as store:
            store.create(keys.claim(site, 0), b"{}")
        return 0

    with pytest.raises(StoreUnusable, match="expired at 1970-01-01 00:16 UTC by the gateway's clock"):
        join(invitation, consenting(run), lambda line: None, claim)
    assert run.store.list(keys.site_prefix("alice")) == []


def test_who_was_revoked_is_told_so_by_the_gateway_in_one_line(run: OwnedRun, gateway: Guarded) -> None:
    invitation = invited(run, gateway)
    Owner(run.store, OWNER).revoke("alice")
    with pytest.raises(InvitationRefused, match="alice to run run was revoked: its key is no longer") as refused:
        join(invitation, consenting(run), lambda line: None, lambda *args: 1)
    assert "\n" not in str(refused.value) and not list((run.folder / "alice").glob("*.key"))


def test_a_volunteer_asks_for_their_contribution_with_the_invitation_alone(run: OwnedRun, gateway: Guarded) -> None:
    invitation = invited(run, gateway)
    come(run, "alice")
    found = contribution_of(invitation, consenting(run))
    assert found == contribution(run.store, "alice") and found.starts == 1
    assert {line["status"] for line in gateway.lines()} <= {200, 404}
    assert "COMPOSER_PRIME_KEY" not in os.environ
