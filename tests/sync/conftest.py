"""Fixtures of the outer loop's tests: a store of the test's own, and a clock that stands until it is moved."""

import pytest

from composer_prime.store import open_store
from tests.servers.fixtures import rclone

__all__ = ["rclone"]


@pytest.fixture
def store(request):
    return open_store(f"memory://{request.node.name}")


@pytest.fixture
def clock():
    return [0.0]
