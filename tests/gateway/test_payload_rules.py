"""How many payloads a member may store for a round, until when, and how often a wrong one is read from the bucket."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from composer_prime.gateway.policy import PAYLOADS_A_ROUND
from composer_prime.gateway.refusal import Refusal
from composer_prime.gateway.rules import PROMISED_S, UNSOUND_S, MemberRules
from composer_prime.gateway.served import Served, serve_run
from composer_prime.gateway.tickets import EXPIRES_S
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.records import Offer
from tests.gateway.guarded import MAX_OBJECT_BYTES, coded, make_run, offer_of, signed
from tests.sync.harness import HandSite

WAIT_S = 600


class Watched:
    """A store that notes what is read of payloads, and can hold such a reader up."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read: list[int] = []
        self.before_read: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._store.get_range(key, start, length)
        if "/payload/" in key:
            self.before_read()
            self.read.append(len(data))
        return data


class Scene:
    def __init__(self, name: str) -> None:
        self.store = open_store(f"memory://payload-rules-{name}")
        self.run: HandSite = make_run(self.store)
        self.served: Served = serve_run(self.store, MAX_OBJECT_BYTES)
        self.served.roster.refresh()
        self.watched, self.now = Watched(self.store), 1000.0
        store: Any = self.watched
        self.rules = MemberRules(store, self.served.facts, self.served.roster, clock=lambda: self.now)
        self.work = coded(self.run)

    def refusal(self, number: int, *, version: int = 0, site: str = "alice") -> str | None:
        """What is said to a payload of its own hash."""
        key = keys.payload(0, version, site, f"{number:064x}"[::-1])
        return self.rules.write_refusal(site, "put", key, self.work.nbytes)

    def offer(self) -> tuple[Offer, str]:
        """Alice's offer, and the key of its payload."""
        offer = offer_of(self.run, "alice", self.work)
        assert offer.payload is not None
        return offer, offer.payload

    def fault(self, offer: Offer) -> str | None:
        return self.rules.content_fault("alice", keys.offer(0, 0, "alice"), signed(self.served, "alice", offer))


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.node.name)


def test_what_was_let_in_counts_before_it_is_there(scene: Scene) -> None:
    let_in = [number for number in range(1, 501) if scene.refusal(number) is None]
    assert let_in == list(range(1, PAYLOADS_A_ROUND + 1))
    assert all(scene.refusal(number) is None for number in let_in), "the same payload again is no other one"
    assert scene.refusal(1, site="bob") is None


def test_payloads_that_come_at_once_are_counted_one_by_one(scene: Scene) -> None:
    together, let_in = threading.Barrier(16), []

    def ask(number: int) -> None:
        together.wait(WAIT_S)
        if scene.refusal(number) is None:
            let_in.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(let_in) == PAYLOADS_A_ROUND


def test_what_never_came_leaves_its_place_when_no_upload_can_go_on(scene: Scene) -> None:
    assert PROMISED_S > EXPIRES_S
    assert [scene.refusal(number) is None for number in range(1, 6)] == [True] * 4 + [False]
    scene.now += PROMISED_S - 1
    assert scene.refusal(5) is not None
    scene.now += 1
    assert scene.refusal(5) is None and len(scene.rules._promised) == 1


def test_promises_of_rounds_that_are_over_are_forgotten(scene: Scene) -> None:
    scene.refusal(1)
    scene.refusal(1, site="bob")
    scene.now += PROMISED_S
    scene.store.create(keys.commit(0, 0), b"{}")
    scene.refusal(1, version=1)
    assert list(scene.rules._promised) == [("alice", 0, 1)]


def test_payloads_of_rounds_that_nobody_takes_any_more_are_refused(scene: Scene) -> None:
    kept = scene.served.facts.terms.max_stale_rounds
    for version in range(30):
        scene.store.create(keys.commit(0, version), b"{}")
    taken = [version for version in range(40) if scene.refusal(1, version=version) is None]
    assert taken == list(range(30 - kept, 31))
    said = scene.refusal(1, version=29 - kept)
    assert said is not None and f"is of a round that is over: payloads count for {kept} rounds more" in said


def test_a_wrong_payload_is_read_once_a_minute(scene: Scene) -> None:
    offer, payload = scene.offer()
    scene.store.put(payload, bytes(scene.work.nbytes))
    faults = {scene.fault(offer) for _ in range(10)}
    assert len(faults) == 1 and "holds bytes whose hash is" in str(faults)
    once = sum(scene.watched.read)
    assert once <= scene.work.nbytes + 2, "its last byte, and all of it"
    scene.store.put(payload, scene.work.data)
    scene.now += UNSOUND_S - 1
    assert scene.fault(offer) is not None and sum(scene.watched.read) == once
    scene.now += 1
    assert scene.fault(offer) is None and sum(scene.watched.read) == 2 * once
    assert scene.fault(offer) is None and sum(scene.watched.read) == 2 * once, "a sound one isn't read again"


def test_a_payload_is_read_for_one_request_at_a_time(scene: Scene) -> None:
    offer, payload = scene.offer()
    scene.store.put(payload, scene.work.data)
    reading, go_on, found = threading.Event(), threading.Event(), []

    def hold_up() -> None:
        reading.set()
        assert go_on.wait(WAIT_S)

    scene.watched.before_read = hold_up
    first = threading.Thread(target=lambda: found.append(scene.fault(offer)))
    first.start()
    assert reading.wait(WAIT_S)
    with pytest.raises(Refusal, match="is being looked at") as refused:
        scene.fault(offer)
    go_on.set()
    first.join(WAIT_S)
    assert refused.value.status == 429 and found == [None] and scene.fault(offer) is None


def test_a_payload_found_sound_for_one_offer_is_looked_at_again_for_one_that_says_another_size(scene: Scene) -> None:
    offer, payload = scene.offer()
    scene.store.put(payload, scene.work.data)
    assert scene.fault(offer) is None and scene.fault(offer) is None
    assert "bytes, it has" in str(scene.rules._payload_fault("key", offer.model_copy(update={"nbytes": 7})))
