"""A malicious member behind a gateway: it holds an admitted key and tries every write that it may not do."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from composer_prime.errors import StoreError
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
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
from tests.gateway.test_policy import OTHERS, OWN, SHA
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


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    bucket = open_store(f"memory://members-{request.node.name}")
    owner = make_run(bucket)
    with guarding(bucket) as gateway:
        alice = gateway.store("alice")
        yield Scene(bucket, owner, gateway, alice)
        alice.close()


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list("")}


# --- what she may ----------------------------------------------------------------------------------------------------


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


def test_listings_leave_out_what_she_may_not_read(scene: Scene) -> None:
    scene.bucket.put(keys.probe("7-ab"), b"x")
    scene.bucket.put("private/notes.txt", b"x")
    assert set(scene.bucket.list("")) - set(scene.alice.list("")) == {keys.probe("7-ab"), "private/notes.txt"}
    for key in (keys.probe("7-ab"), "private/notes.txt"):
        assert "names nothing that a member" in refusal(lambda key=key: scene.alice.get(key))


# --- what she may not ------------------------------------------------------------------------------------------------


def test_no_record_of_the_run_s_own_is_written_overwritten_or_deleted(scene: Scene) -> None:
    before = contents(scene.bucket)
    with closing(scene.gateway.store("alice", inline_bytes=0)) as large:
        for key in OTHERS.values():
            for store in (scene.alice, large):
                assert "(403)" in refusal(lambda s=store, k=key: s.create(k, b"{}")), key
                assert "(403)" in refusal(lambda s=store, k=key: s.put(k, b"{}")), key
                assert "(403)" in refusal(lambda s=store, k=key: s.delete(k)), key
    assert contents(scene.bucket) == before


def test_nothing_is_written_under_another_s_name(scene: Scene) -> None:
    before = contents(scene.bucket)
    for key, other in ((make(other), other) for make, _ in OWN.values() for other in ("a", "bob", "alice-2")):
        assert f"is site {other}'s" in refusal(lambda k=key: scene.alice.create(k, b"{}")), key
        assert f"is site {other}'s" in refusal(lambda k=key: scene.alice.put(k, b"{}")), key
        assert "deletes nothing" in refusal(lambda k=key: scene.alice.delete(k)), key
    assert contents(scene.bucket) == before


def test_nothing_of_her_own_is_deleted_either(scene: Scene) -> None:
    scene.alice.create(keys.claim("alice", 0), scene.sign(claim_of("alice")))
    assert "deletes nothing" in refusal(lambda: scene.alice.delete(keys.claim("alice", 0)))


def test_what_is_written_once_stays(scene: Scene) -> None:
    payload = coded(scene.owner)
    offer, other = offer_of(scene.owner, "alice", payload), offer_of(scene.owner, "alice", payload, tokens=9)
    assert offer.payload is not None
    scene.alice.put(offer.payload, payload.data)
    scene.alice.put(offer.payload, payload.data)
    assert scene.alice.create(keys.offer(0, 0, "alice"), scene.sign(offer))
    assert scene.alice.create(keys.offer(0, 0, "alice"), scene.sign(offer))
    assert not scene.alice.create(keys.offer(0, 0, "alice"), scene.sign(other))
    assert "written once" in refusal(lambda: scene.alice.put(keys.offer(0, 0, "alice"), scene.sign(other)))
    assert scene.bucket.get(keys.offer(0, 0, "alice")) == scene.sign(offer)


def forged_claims(scene: Scene) -> Iterator[tuple[str, bytes]]:
    yield "has a signature that is not alice's", scene.sign(claim_of("alice"), name="bob")
    yield "is not signed", claim_of("alice").to_bytes()
    yield "the record claims bob/0", scene.sign(claim_of("bob"))
    yield "the record claims alice/5", scene.sign(claim_of("alice", 5))
    yield "is no Claim", b"{}"
    yield "is no Claim", b"\xff\x00"
    yield "at most 4096", bytes(5000)


def test_a_claim_that_isn_t_hers_is_refused(scene: Scene) -> None:
    for words, data in forged_claims(scene):
        assert words in refusal(lambda data=data: scene.alice.create(keys.claim("alice", 0), data))
    assert scene.bucket.list(keys.site_prefix("alice")) == []


def forged_beats(scene: Scene) -> Iterator[tuple[str, bytes]]:
    yield "has a signature that is not alice's", scene.sign(beat_of("alice", counter=9), name="bob")
    yield "the record is of bob/0", scene.sign(beat_of("bob", counter=9))
    yield "the record is of alice/1", scene.sign(beat_of("alice", 1, counter=9))
    yield "counts 3, the beat that stands there 3", scene.sign(beat_of("alice", counter=3, inner_step=7))
    yield "1 versions and 2 pins, the run has 2", scene.sign(beat_of("alice", counter=9, versions=(0,)))
    yield "is no Beat", b"{}"
    for field in ("counter", "inner_step", "trained_tokens"):
        wrong = scene.sign(beat_of("alice", counter=9).model_copy(update={field: 10**400}))
        yield f"is no Beat: {field}: Input should be less than or equal to {2**53}", wrong


def test_a_beat_that_isn_t_hers_or_comes_too_late_is_refused(scene: Scene) -> None:
    key, good = keys.beat("alice", 0), scene.sign(beat_of("alice", counter=3))
    scene.alice.put(key, good)
    for words, data in forged_beats(scene):
        assert words in refusal(lambda data=data: scene.alice.put(key, data)), words
    assert "is overwritten: put it" in refusal(lambda: scene.alice.create(keys.beat("alice", 1), good))
    assert scene.bucket.get(key) == good


@pytest.mark.parametrize(
    "data", [b"", b"text", b"[]\n", b'"site"\n', tape_of("bob"), tape_of("alice") + tape_of("bob"), b"\xff"]
)
def test_a_tape_that_isn_t_hers_is_refused(scene: Scene, data: bytes) -> None:
    assert "(403)" in refusal(lambda: scene.alice.create(tape_key("alice", data), data))
    assert scene.bucket.list(keys.tape_prefix("alice")) == []


def test_a_payload_whose_bytes_aren_t_those_of_its_name_is_refused(scene: Scene) -> None:
    payload = coded(scene.owner)
    wrong = bytearray(payload.data)
    wrong[0] ^= 1
    key = keys.payload(0, 0, "alice", payload.sha256)
    assert "holds bytes whose hash is" in refusal(lambda: scene.alice.put(key, bytes(wrong)))
    assert "has" in refusal(lambda: scene.alice.put(key, bytes(wrong) + b"x"))
    assert "bytes" in refusal(lambda: scene.alice.put(key, b""))
    assert not scene.bucket.list(keys.payloads_prefix(0, 0, "alice"))


def test_payloads_and_offers_of_rounds_to_come_are_refused(scene: Scene) -> None:
    payload = coded(scene.owner)
    for version in (1, 2, 99_999_999):
        key = keys.payload(0, version, "alice", payload.sha256)
        assert "hasn't come" in refusal(lambda key=key: scene.alice.put(key, bytes(payload.data)))
        offer = scene.sign(offer_of(scene.owner, "alice", payload, version=version))
        assert "hasn't come" in refusal(lambda v=version, o=offer: scene.alice.create(keys.offer(0, v, "alice"), o))


def test_the_bucket_isn_t_filled_with_payloads(scene: Scene) -> None:
    payloads = [coded(scene.owner, value=float(number)) for number in range(5)]
    for payload in payloads[:4]:
        scene.alice.put(keys.payload(0, 0, "alice", payload.sha256), payload.data)
    last = payloads[4]
    assert "at most 4 for one round" in refusal(
        lambda: scene.alice.put(keys.payload(0, 0, "alice", last.sha256), last.data)
    )
    scene.alice.put(keys.payload(0, 0, "alice", payloads[0].sha256), payloads[0].data)
    bob = scene.gateway.store("bob")
    bob.put(keys.payload(0, 0, "bob", last.sha256), last.data)
    bob.close()


def forged_offers(scene: Scene) -> Iterator[tuple[str, bytes]]:
    payload, run = coded(scene.owner), scene.owner
    key = keys.payload(0, 0, "alice", payload.sha256)
    yield "signature that is not alice's", scene.sign(offer_of(run, "alice", payload), name="bob")
    yield "is not signed", offer_of(run, "alice", payload).to_bytes()
    yield "record says bob", scene.sign(offer_of(run, "bob", payload))
    yield "record says alice 0/1", scene.sign(offer_of(run, "alice", payload, version=1, payload=key))
    yield (
        "payload belongs to fragment 0 of bob",
        scene.sign(offer_of(run, "alice", payload, payload=keys.payload(0, 0, "bob", payload.sha256))),
    )
    yield (
        "key is not that of its sha256",
        scene.sign(offer_of(run, "alice", payload, payload=keys.payload(0, 0, "alice", SHA))),
    )
    yield "coded as int8", scene.sign(offer_of(run, "alice", payload, codec="int8"))
    yield "says 1099511627776 bytes", scene.sign(offer_of(run, "alice", payload, nbytes=2**40))
    yield "don't make the sha256", scene.sign(offer_of(run, "alice", payload, slices=""))
    yield "norms", scene.sign(offer_of(run, "alice", payload, norms=()))
    yield "tokens", scene.sign(offer_of(run, "alice", payload, tokens=0))
    for field in ("tokens", "steps", "trained_tokens"):
        wrong = scene.sign(offer_of(run, "alice", payload).model_copy(update={field: 10**400}))
        yield f"is no Offer: {field}: Input should be less than or equal to {2**53}", wrong
    yield "does not name a payload", scene.sign(offer_of(run, "alice", payload, payload=keys.manifest()))
    yield "is no Offer", b"{}"
    yield "at most 262144", bytes(2**18 + 1)
    yield "which isn't there", scene.sign(offer_of(run, "alice", payload))


def test_an_offer_that_no_reader_would_take_is_refused(scene: Scene) -> None:
    for words, data in forged_offers(scene):
        assert words in refusal(lambda data=data: scene.alice.create(keys.offer(0, 0, "alice"), data)), words
    assert scene.bucket.list(keys.offers_prefix(0, 0)) == []


def test_an_offer_whose_payload_was_swapped_in_the_bucket_is_refused(scene: Scene) -> None:
    payload = coded(scene.owner)
    offer = offer_of(scene.owner, "alice", payload)
    assert offer.payload is not None
    for wrong, words in ((bytes(payload.nbytes + 1), "more"), (b"", "fewer"), (bytes(payload.nbytes), "hash")):
        scene.bucket.put(offer.payload, wrong)
        assert words in refusal(lambda: scene.alice.create(keys.offer(0, 0, "alice"), scene.sign(offer)))
    assert scene.bucket.list(keys.offers_prefix(0, 0)) == []


def test_a_word_that_there_is_nothing_to_offer_needs_no_payload(scene: Scene) -> None:
    nothing = {"payload": None, "sha256": None, "slices": "", "nbytes": 0, "norms": (), "tokens": 0, "steps": 0}
    offer = offer_of(scene.owner, "alice", coded(scene.owner), **nothing)
    assert scene.alice.create(keys.offer(0, 0, "alice"), scene.sign(offer))


def test_everything_she_tried_is_in_the_audit_log_under_her_name(scene: Scene) -> None:
    tried: list[Callable[[], object]] = [
        lambda: scene.alice.create(keys.commit(0, 0), b"{}"),
        lambda: scene.alice.put(keys.beat("bob", 0), b"{}"),
        lambda: scene.alice.delete(keys.manifest()),
    ]
    for act in tried:
        with pytest.raises(StoreError):
            act()
    refused = [line for line in scene.gateway.lines() if line["verdict"] == "refused"]
    assert [(line["site"], line["operation"]) for line in refused] == [
        ("alice", "create"),
        ("alice", "put"),
        ("alice", "DELETE"),
    ]
    assert json.dumps(refused).count("member behind a gateway") == 2
