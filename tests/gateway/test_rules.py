"""Which rounds a member may write for, and how many payloads it may store for one."""

import threading

import pytest

from composer_prime.gateway.rules import PAYLOADS_A_ROUND, MemberRules
from composer_prime.gateway.serving import serve_run
from composer_prime.store import keys
from composer_prime.store.base import Store
from tests.gateway.guarded import MAX_OBJECT_BYTES, coded, make_run

WAIT_S = 600


class Scene:
    def __init__(self, store: Store) -> None:
        self.store, self.run = store, make_run(store)
        served = serve_run(store, MAX_OBJECT_BYTES)
        served.roster.refresh()
        self.kept = served.facts.terms.max_stale_rounds
        self.rules = MemberRules(store, served.facts, served.roster)
        self.nbytes = coded(self.run).nbytes

    def payload(self, number: int, *, version: int = 0, site: str = "alice") -> str | None:
        """What is said to a payload of its own hash."""
        key = keys.payload(0, version, site, f"{number:064x}"[::-1])
        return self.rules.write_refusal(site, "put", key, self.nbytes)

    def close_rounds(self, number: int) -> None:
        for version in range(number):
            self.store.create(keys.commit(0, version), b"{}")


@pytest.fixture
def scene(store: Store) -> Scene:
    return Scene(store)


def test_what_was_let_in_counts_before_it_is_there(scene: Scene) -> None:
    let_in = [number for number in range(1, 501) if scene.payload(number) is None]
    assert let_in == list(range(1, PAYLOADS_A_ROUND + 1))
    assert all(scene.payload(number) is None for number in let_in), "the same payload again is no other one"
    assert scene.payload(1, site="bob") is None


def test_what_is_stored_counts_also_at_a_gateway_that_was_started_since(scene: Scene) -> None:
    for number in range(1, PAYLOADS_A_ROUND + 1):
        scene.store.put(keys.payload(0, 0, "alice", f"{number:064x}"[::-1]), b"x")
    scene.store.put(keys.payload(0, 0, "alice-2", "0" * 64), b"x")
    assert "one payload too many" in (scene.payload(9) or "") and scene.payload(1) is None
    assert scene.payload(9, site="bob") is None


def test_payloads_that_come_at_once_are_counted_one_by_one(scene: Scene) -> None:
    together, let_in = threading.Barrier(16), []

    def ask(number: int) -> None:
        together.wait(WAIT_S)
        if scene.payload(number) is None:
            let_in.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(let_in) == PAYLOADS_A_ROUND


def test_payloads_of_rounds_that_are_over_or_to_come_are_refused_and_forgotten(scene: Scene) -> None:
    assert scene.payload(1) is None
    scene.close_rounds(30)
    taken = [version for version in range(40) if scene.payload(1, version=version) is None]
    assert taken == list(range(30 - scene.kept, 31))
    said = scene.payload(1, version=29 - scene.kept)
    assert said is not None and f"is of a round that is over: payloads count for {scene.kept} rounds more" in said
    assert "hasn't come" in (scene.payload(1, version=31) or "")
    assert "hasn't come" in (scene.rules.write_refusal("alice", "create", keys.offer(0, 31, "alice"), 10) or "")
    assert (0, 0) not in scene.rules._let_in
