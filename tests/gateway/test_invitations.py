"""An invitation that is over lets nobody in for the first time, by the gateway's clock; who is in stays in."""

import time
from contextlib import closing
from typing import Any

import pytest

from composer_prime.errors import StoreUnusable
from composer_prime.gateway import invitation_keys
from composer_prime.gateway.rules import Invitations
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Invited
from composer_prime.sync.signatures import SigningKey
from tests.gateway.guarded import (
    KEYS,
    OWNER,
    Guarded,
    beat_of,
    claim_of,
    coded,
    guarding,
    make_run,
    offer_of,
    signed,
    tape_key,
    tape_of,
)
from tests.sync.harness import HandSite

EXPIRES_AT = 1_000_000
"""1970-01-12: over by every clock."""


def leave_invitation(
    store: Store,
    run_sha: str,
    expires_at: int,
    *,
    site: str = "alice",
    number: int = 1,
    public: str | None = None,
    signer: SigningKey = OWNER,
) -> None:
    """Put the record of an invitation into the bucket, as `invite` does."""
    key = KEYS[site].public if public is None else public
    record = Invited(site=site, number=number, public=key, guest=True, expires_at=expires_at)
    record = record.model_copy(update={"signature": signer.sign(record.message(run_sha))})
    assert store.create(invitation_keys.invitation(site, number), record.to_bytes())


def claim(gateway: Guarded, name: str, incarnation: int = 0) -> bool:
    """As a site comes in through the gateway."""
    with closing(gateway.store(name)) as store:
        data = signed(gateway.served, name, claim_of(name, incarnation))
        return store.create(keys.claim(name, incarnation), data)


def test_the_first_claim_by_an_invitation_that_is_over_is_refused_in_one_line(store: Store, gateway: Guarded) -> None:
    leave_invitation(store, gateway.served.roster._run_sha, EXPIRES_AT)
    with pytest.raises(StoreUnusable, match=r"alice expired at 1970-01-12 13:46 UTC by the gateway's .* owner") as said:
        claim(gateway, "alice")
    assert "\n" not in str(said.value)
    assert store.list(keys.site_prefix("alice")) == []
    refused = [line for line in gateway.lines() if line["status"] >= 400]
    assert {(line["site"], line["status"]) for line in refused} == {("alice", 403)}


def test_who_did_not_come_in_time_writes_nothing_else_either(store: Store) -> None:
    owner = make_run(store)
    with guarding(store) as gateway:
        leave_invitation(store, gateway.served.roster._run_sha, EXPIRES_AT)
        work = coded(owner)
        offer = offer_of(owner, "alice", work)
        assert offer.payload is not None
        before = store.list("")
        writes = {
            offer.payload: ("put", bytes(work.data)),
            keys.beat("alice", 0): ("put", signed(gateway.served, "alice", beat_of("alice"))),
            tape_key("alice", tape_of("alice")): ("create", tape_of("alice")),
        }
        with closing(gateway.store("alice")) as alice:
            for key, (operation, data) in writes.items():
                with pytest.raises(StoreUnusable, match="by the gateway's clock"):
                    getattr(alice, operation)(key, data)
            assert alice.get(keys.manifest()) == store.get(keys.manifest())  # she may look, until she is revoked
        assert store.list("") == before


def test_a_site_that_came_in_time_may_come_again_later(store: Store, gateway: Guarded) -> None:
    """By a gateway that saw it come, and by one that was started since."""
    store.create(keys.claim("alice", 0), signed(gateway.served, "alice", claim_of("alice")))
    leave_invitation(store, gateway.served.roster._run_sha, EXPIRES_AT)
    assert claim(gateway, "alice", 1)
    with guarding(store) as another:
        assert claim(another, "alice", 2)


MALLORY_S = KEYS["mallory"].public


@pytest.mark.parametrize(
    ("left", "now", "is_over"),
    [
        ([{}], EXPIRES_AT - 1, False),
        ([{}], EXPIRES_AT, True),
        ([{}, {"expires_at": EXPIRES_AT + 60}], EXPIRES_AT, False),
        ([{}, {"public": MALLORY_S}], EXPIRES_AT, False),
        ([{}, {"expires_at": EXPIRES_AT + 60, "signer": KEYS["alice"]}], EXPIRES_AT, True),
        ([{"signer": KEYS["mallory"]}], EXPIRES_AT, False),
        ([{"run_sha": "0" * 64}], EXPIRES_AT, False),
    ],
    ids=[
        "its last second",
        "over",
        "the newest counts",
        "of a key that isn't admitted",
        "prolonged by a forged record",
        "ended by a forged record",
        "of another run",
    ],
)
def test_an_invitation_s_end_is_what_its_owner_signed_last(
    store: Store, left: list[dict[str, Any]], now: int, is_over: bool
) -> None:
    run = _roster(store)
    for number, changes in enumerate(left, start=1):
        leave_invitation(store, **{"run_sha": run.run.sha256, "expires_at": EXPIRES_AT, "number": number} | changes)
    said = Invitations(store, run.roster, wall=lambda: float(now)).refusal("alice")
    assert ("expired at" in (said or "")) == is_over and (said is None) == (not is_over)


def test_a_claim_by_an_earlier_invitation_s_key_lets_nobody_in(store: Store) -> None:
    run = _roster(store)
    earlier = claim_of("alice")
    signature = KEYS["alice"].sign(earlier.message(run.run.sha256))
    store.create(keys.claim("alice", 0), earlier.model_copy(update={"signature": signature}).to_bytes())
    Owner(store, OWNER).admit("alice", MALLORY_S, guest=True)
    run.roster.refresh()
    leave_invitation(store, run.run.sha256, EXPIRES_AT, public=MALLORY_S)
    assert Invitations(store, run.roster, wall=time.time).refusal("alice")


def _roster(store: Store) -> HandSite:
    """The run's first site, whose roster knows the guests."""
    run = make_run(store)
    run.roster.refresh()
    return run


def test_a_site_that_is_in_costs_no_more_looks(store: Store) -> None:
    run = _roster(store)

    class Counting:
        lists = 0

        def __getattr__(self, name: str) -> object:
            Counting.lists += name == "list"
            return getattr(store, name)

    counting: Store = Counting()  # pyright: ignore[reportAssignmentType]
    invitations = Invitations(counting, run.roster, wall=lambda: EXPIRES_AT - 1.0)
    record = claim_of("alice")
    signature = KEYS["alice"].sign(record.message(run.run.sha256))
    store.create(keys.claim("alice", 0), record.model_copy(update={"signature": signature}).to_bytes())
    assert [invitations.refusal("alice") for _ in range(5)] == [None] * 5
    assert Counting.lists == 1
