"""What several benches' tests need of the machine."""

import pytest

from composer_prime.errors import BadInput
from tests.bench.link import network as link_network


@pytest.fixture
def links() -> None:
    """Skips with the reason where this machine can't shape links."""
    reason = link_network.why_not()
    if reason is None:
        try:
            with link_network.network(["a"]) as made:
                made.shape(50)
        except BadInput as error:
            reason = str(error)
    if reason is not None:
        pytest.skip(reason)
