"""Snapshots are what joiners come in by: one whose upload failed is tried again."""

from composer_prime.errors import StoreError
from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.archive import AGAIN_S
from tests.sync.harness import HandSite, make_terms


class NoSnapshots(MemoryStore):
    """Takes no master while it is full."""

    is_full = False

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.is_full and keys.is_master(key):
            raise StoreError(f"{key} can't be put: free some space")
        super().put(key, data)


def versions_stored(store: MemoryStore) -> list[int]:
    return sorted(keys.parse_master(key)[1] for key in store.list(keys.masters_prefix(0)))


def one_round(site: HandSite) -> None:
    site.hand_over(0, 1.0)
    site.tick(times=3)
    site.runtime.run_tasks()
    site.courier.collect(0)


def test_a_snapshot_whose_upload_failed_is_tried_again_before_the_next_is_due() -> None:
    store, clock = NoSnapshots("test_archive"), [0.0]
    site = HandSite(store, make_terms(fragments=1, snapshot_rounds=8, rounds=40), "a", clock)
    for _ in range(7):
        one_round(site)
    store.is_full = True
    one_round(site)
    assert versions_stored(store) == [0]
    store.is_full = False
    one_round(site)
    assert versions_stored(store) == [0], "not before some time has passed"
    clock[0] += AGAIN_S
    site.tick(times=2)
    site.tick()
    assert versions_stored(store) == [0, 8]


def test_of_a_failed_snapshot_nothing_is_left_to_do_once_a_newer_one_stands() -> None:
    store, clock = NoSnapshots("test_archive_newer"), [0.0]
    site = HandSite(store, make_terms(fragments=1, snapshot_rounds=2, rounds=40), "a", clock)
    store.is_full = True
    for _ in range(2):
        one_round(site)
    store.is_full = False
    for _ in range(2):
        one_round(site)
    clock[0] += AGAIN_S
    site.tick(times=2)
    site.tick()
    assert versions_stored(store) == [0, 4]


def test_a_snapshot_that_is_due_while_another_is_stored_is_stored_afterwards_though_rounds_went_on() -> None:
    store, clock = MemoryStore("test_archive_waiting"), [0.0]
    site = HandSite(store, make_terms(fragments=2, snapshot_rounds=4, rounds=40), "a", clock)
    for _ in range(6):  # a slow link: what stores the first snapshot doesn't come to it
        for fragment in (0, 1):
            site.hand_over(fragment, 1.0)
            stored = site.courier._archive.task
            next(task for task in site.runtime.tasks if task.is_alive() and task is not stored).run()
            for _ in range(3):
                site.courier.follow()
                site.courier.tick()
            site.courier.collect(fragment)
    assert site.courier.versions() == (6, 6) and store.list("masters/0001/00000004") == []
    site.tick(times=2)
    site.tick()
    assert [len(store.list(f"masters/000{fragment}/00000004")) for fragment in (0, 1)] == [1, 1]
