"""A gateway's run in a memory store of the test's own, and the gateway's clients, for tests that need no other."""

from collections.abc import Iterator

import pytest

from composer_prime.store import Store, open_store
from tests.gateway.guarded import Guarded, guarding, make_run


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.module.__name__}-{request.node.name}")


@pytest.fixture
def gateway(store: Store) -> Iterator[Guarded]:
    make_run(store)
    with guarding(store) as guarded:
        yield guarded
