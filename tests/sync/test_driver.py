"""How often a site looks into the bucket: seldom while nothing can have happened there, often when training waits."""

import threading

from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.driver import BUSY_POLL_S, IDLE_POLL_S, OPEN_POLL_S, Driver
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Beat
from composer_prime.sync.tape import Tape
from tests.patience import PATIENCE_S
from tests.sync.harness import HandSite, make_terms


def driver_of(site: HandSite) -> Driver:
    tape = Tape(site.store, site.name, site.incarnation)
    driver = Driver(site.courier, site.pulse, tape, runtime=site.runtime, beat_every_s=5.0, progress=lambda: (0, 0))
    driver.awaited = True
    return driver


def test_a_site_looks_seldom_until_its_own_upload_has_come_and_often_then(store, clock):
    a, b = HandSite(store, make_terms(quorum=2), "a", clock), HandSite(store, make_terms(quorum=2), "b", clock)
    driver = driver_of(a)
    assert driver._patience_s(0.0) == IDLE_POLL_S
    b.hand_over(0, 1.0)
    b.tick()  # its offer stands: without one of a's own the round stays open all the same
    a.hand_over(0, 2.0)
    a.courier.tick()
    assert store.list(keys.offers_prefix(0, 0))
    assert driver._patience_s(0.0) == OPEN_POLL_S
    a.runtime.run_tasks()
    assert driver._patience_s(0.0) == BUSY_POLL_S
    a.courier.tick()
    assert a.courier.versions() == (1, 0)


def test_one_offer_that_stands_is_watched_while_another_fragments_upload_goes_on(store, clock):
    a = HandSite(store, make_terms(quorum=2), "a", clock)
    a.hand_over(0, 1.0)
    a.tick()
    a.hand_over(1, 1.0)
    assert driver_of(a)._patience_s(0.0) == BUSY_POLL_S


def test_a_beat_that_is_late_on_its_way_does_not_overwrite_the_word_that_a_site_leaves(store, clock):
    held, gate = threading.Event(), threading.Event()

    class Late(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            if keys.is_beat(key) and not held.is_set() and threading.current_thread().name == "beating":
                held.set()
                assert gate.wait(PATIENCE_S)
            super().put(key, data)

    driver = driver_of(HandSite(Late(store.uri.removeprefix("memory://")), make_terms(), "a", clock))
    driver._state = "live"
    beating = threading.Thread(target=driver._try_beat, name="beating", daemon=True)
    beating.start()
    assert held.wait(PATIENCE_S)
    leaving = threading.Thread(target=driver.announce, args=["leaving"], daemon=True)
    leaving.start()
    leaving.join(0.2)
    gate.set()
    for thread in (beating, leaving):
        thread.join(PATIENCE_S)
    assert read_record(store, Beat, keys.beat("a", 0)).state == "leaving"
