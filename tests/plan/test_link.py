"""The measured link: what the store lets through, within bounds, and nothing left behind."""

import pytest

from composer_prime.errors import StoreError
from composer_prime.plan.traffic import MOST_BYTES, measure
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.metered import BYTES_PER_MBIT


class SlowStore(MemoryStore):
    """A store at the end of a link: its time passes with what is moved."""

    def __init__(self, name: str, up_mbit: float, down_mbit: float, delay_s: float = 0.05) -> None:
        super().__init__(name)
        self.now, self.moved, self._delay_s = 0.0, 0, delay_s
        self._rates = {"up": up_mbit * BYTES_PER_MBIT, "down": down_mbit * BYTES_PER_MBIT}

    def _pass(self, way: str, num_bytes: int) -> None:
        self.now += self._delay_s + num_bytes / self._rates[way]
        self.moved += num_bytes

    def put(self, key, data) -> None:
        self._pass("up", len(data))
        super().put(key, data)

    def get(self, key) -> bytes:
        data = super().get(key)
        self._pass("down", len(data))
        return data

    def get_range(self, key, start, length) -> bytes:
        data = super().get(key)[start : start + length]
        self._pass("down", len(data))
        return data

    def list(self, prefix) -> list[str]:
        self.now += self._delay_s
        return super().list(prefix)


@pytest.mark.parametrize(("up", "down"), [(0.5, 2.0), (10.0, 50.0), (40.0, 40.0)])
def test_the_rates_are_those_of_the_link(up: float, down: float, request: pytest.FixtureRequest) -> None:
    store = SlowStore(request.node.name, up, down)
    link = measure(store, clock=lambda: store.now)
    assert link.up_mbit == pytest.approx(up, rel=0.2) and link.down_mbit == pytest.approx(down, rel=0.3)
    assert link.delay_s == pytest.approx(0.05) and store.now < 10
    assert store.list("") == [] and store.moved <= 3 * MOST_BYTES


class Guarded(SlowStore):
    def put(self, key, data) -> None:
        raise StoreError("the gateway says: not your object")


def test_a_store_that_takes_no_trials_is_only_read_from(request: pytest.FixtureRequest) -> None:
    store = Guarded(request.node.name, 10.0, 50.0)
    assert measure(store, clock=lambda: store.now).down_mbit is None
    MemoryStore.put(store, "masters/0000/00000000-0123456789abcdef", bytes(2**20))
    link = measure(store, clock=lambda: store.now)
    assert link.up_mbit is None and "not your object" in link.problem
    assert link.down_mbit == pytest.approx(50.0, rel=0.3)


def test_where_nothing_is_written_a_slow_link_fetches_no_more_than_tells_its_rate(
    request: pytest.FixtureRequest,
) -> None:
    store = Guarded(request.node.name, 10.0, 10.0)
    MemoryStore.put(store, "masters/0000/00000000-0123456789abcdef", bytes(2**23))
    assert measure(store, clock=lambda: store.now).down_mbit == pytest.approx(10.0, rel=0.1)
    assert store.moved < 1.4e6
