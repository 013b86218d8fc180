"""A malicious member behind a gateway: it holds an admitted key and tries every write that it may not do."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.records import Commit
from tests.gateway.guarded import (
    Guarded,
    beat_of,
    claim_of,
    coded,
    guarding,
    make_run,
    offer_of,
    refusal,
    signed,
    tape_key,
    tape_of,
)
from tests.gateway.test_policy import OTHERS, OWN
from tests.sync.harness import HandSite


@dataclass(frozen=True)
class Scene:
    """bucket: as its owner sees it; owner: the site that made the run; alice: the bucket as she sees it."""

    bucket: Store
    owner: HandSite
    gateway: Guarded
    alice: Store

    def sign(self, record: object, name: str = "alice") -> bytes:
        return signed(self.gateway.served, name, record)

    def contents(self) -> dict[str, bytes]:
        return {key: self.bucket.get(key) for key in self.bucket.list("")}


@pytest.fixture
def scene(store: Store) -> Iterator[Scene]:
    owner = make_run(store)
    with guarding(store) as gateway, closing(gateway.store("alice")) as alice:
        yield Scene(store, owner, gateway, alice)


def test_a_member_makes_its_offer_and_is_seen_to_live(scene: Scene) -> None:
    payload = coded(scene.owner)
    offer = offer_of(scene.owner, "alice", payload)
    assert scene.alice.create(keys.claim("alice", 0), scene.sign(claim_of("alice")))
    scene.alice.put(keys.beat("alice", 0), scene.sign(beat_of("alice")))
    scene.alice.put(keys.beat("alice", 0), scene.sign(beat_of("alice", counter=2)))
    assert offer.payload is not None
    scene.alice.put(offer.payload, payload.data)
    assert scene.alice.create(keys.offer(0, 0, "alice"), scene.sign(offer))
    assert scene.alice.create(tape_key("alice", tape_of("alice")), tape_of("alice"))
    assert scene.bucket.get(offer.payload) == bytes(payload.data)
    assert scene.alice.get(keys.manifest()) == scene.bucket.get(keys.manifest())
    assert scene.alice.list("") == scene.bucket.list("")


def test_what_she_may_not_read_is_neither_listed_nor_given(scene: Scene) -> None:
    hidden = {keys.probe("7-ab"), "private/notes.txt"}
    for key in hidden:
        scene.bucket.put(key, b"x")
        assert "names nothing that a member" in refusal(lambda key=key: scene.alice.get(key))
    assert set(scene.bucket.list("")) - set(scene.alice.list("")) == hidden


@pytest.mark.parametrize("inline_bytes", [2**18, 0], ids=["as a record", "by a ticket"])
def test_she_writes_nothing_that_decides_for_others_and_nothing_under_another_s_name(
    scene: Scene, inline_bytes: int
) -> None:
    before = scene.contents()
    others = [(key, "") for key in OTHERS.values()]
    others += [(make(other), f"is site {other}'s") for make, _ in OWN.values() for other in ("a", "bob", "alice-2")]
    with closing(scene.gateway.store("alice", inline_bytes=inline_bytes)) as alice:
        for key, words in others:
            for said in (refusal(lambda k=key: alice.create(k, b"{}")), refusal(lambda k=key: alice.put(k, b"{}"))):
                assert "(403)" in said and words in said, key
            assert "(403)" in refusal(lambda k=key: alice.delete(k)), key
    assert scene.contents() == before


def test_what_she_wrote_once_stays_as_it_was(scene: Scene) -> None:
    payload = coded(scene.owner)
    offer = offer_of(scene.owner, "alice", payload)
    wrote = {
        keys.claim("alice", 0): scene.sign(claim_of("alice")),
        keys.offer(0, 0, "alice"): scene.sign(offer),
        tape_key("alice", tape_of("alice")): tape_of("alice"),
        str(offer.payload): bytes(payload.data),
    }
    for key, data in wrote.items():
        assert scene.alice.create(key, data) and scene.alice.create(key, data), "also when the first answer was lost"
        assert not scene.alice.create(key, bytes(len(data))), key
        assert "written once" in refusal(lambda k=key, d=data: scene.alice.put(k, bytes(len(d)))), key
        assert "deletes nothing" in refusal(lambda k=key: scene.alice.delete(k)), key
    assert {key: scene.bucket.get(key) for key in wrote} == wrote


def test_a_beat_is_put_and_never_created(scene: Scene) -> None:
    said = refusal(lambda: scene.alice.create(keys.beat("alice", 1), scene.sign(beat_of("alice", 1))))
    assert "is overwritten: put it" in said and not scene.bucket.list(keys.site_prefix("alice"))


def test_a_record_that_lies_is_stored_and_no_site_takes_it(scene: Scene) -> None:
    """Readers judge what records say; the gateway sees to names, sizes and numbers alone."""
    forged = scene.sign(offer_of(scene.owner, "alice", coded(scene.owner)), name="bob")
    assert scene.alice.create(keys.offer(0, 0, "alice"), forged)
    scene.owner.hand_over(0, 1.0)
    scene.owner.tick(times=5)
    commit = Commit.from_bytes(scene.bucket.get(keys.commit(0, 0)), "")
    assert [entry.site for entry in commit.taken] == ["a"]
