"""Whole runs in which one site reaches the bucket through a gateway alone: it is merged and ends with the masters."""

import time
from collections.abc import Callable
from contextlib import closing

import pytest

from composer_prime.errors import SiteRevoked
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Commit
from tests.gateway.guarded import KEYS, OWNER, PATIENCE_S, SAFE, Guarded, founding, guarding, make_run
from tests.sync.harness import ThreadSite, make_terms, start_together

TERMS = {"liveness_s": PATIENCE_S, "grace_s": PATIENCE_S}


def site(store: Store, name: str, **terms: object) -> ThreadSite:
    wanted = make_terms(**SAFE | TERMS | terms)
    return ThreadSite(store, wanted, name, data_seed=len(name), key=KEYS[name], founding=founding())


def taken(store: Store, fragment: int, version: int) -> list[str]:
    key = keys.commit(fragment, version)
    return [entry.site for entry in Commit.from_bytes(store.get(key), key).taken]


@pytest.mark.parametrize("kind", ["memory", pytest.param("seaweed", marks=pytest.mark.s3)])
def test_a_site_behind_a_gateway_is_merged_and_ends_with_the_masters(
    kind: str, store_uri: Callable[[str], str]
) -> None:
    with closing(open_store(store_uri(kind))) as bucket:
        make_run(bucket, **TERMS)
        owners = site(open_store(bucket.uri), "a")
        with guarding(bucket) as gateway:
            volunteer = site(gateway.store("alice", inline_bytes=256), "alice")
            start_together(owners, volunteer)
            wait_for_end(volunteer, owners)
        masters = [member.summary["masters"] for member in (owners, volunteer)]
        assert masters[0] == masters[1]
        assert any("alice" in taken(bucket, fragment, version) for fragment in (0, 1) for version in range(1, 4))
        assert sum(ledger["merged"] for ledger in volunteer.summary["tokens"]) > 0
        refused = [line for line in gateway.lines() if line["status"] not in (200, 404)]
        assert refused == [], "a sound site asks for nothing that it may not have"


def test_a_site_whose_key_is_revoked_meanwhile_ends_in_one_line() -> None:
    bucket = open_store("memory://training-revoked")
    make_run(bucket)  # whose site a closes no round: alice trains, and waits for one
    with guarding(bucket) as gateway, closing(gateway.store("alice", inline_bytes=256)) as store:
        volunteer = ThreadSite(store, make_terms(**SAFE), "alice", key=KEYS["alice"])
        volunteer.after_join = lambda: revoke(bucket, gateway)
        volunteer.start()
        volunteer.join(600)
        assert not volunteer.is_alive()
    assert isinstance(volunteer.error, SiteRevoked)
    assert str(volunteer.error) == str(SiteRevoked.of("alice")), "whether the gateway says it, or the admissions"


def revoke(bucket: Store, gateway: Guarded) -> None:
    """Revoke alice's key, and wait until the gateway has seen it."""
    Owner(bucket, OWNER).revoke("alice")
    deadline = time.monotonic() + 600
    while gateway.ask("alice", "GET", "site").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_for_end(*members: ThreadSite) -> None:
    for member in members:
        member.join(600)
        assert not member.is_alive()
        if member.error is not None:
            raise member.error
