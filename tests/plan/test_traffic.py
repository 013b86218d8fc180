"""What `plan` counts beside what a real round of real sites moves: within 10 %."""

import pytest

from composer_prime.outer.codecs import CODECS
from composer_prime.plan.traffic import seconds, traffic
from composer_prime.store import open_store
from tests.sync.test_many_sites import Crowd, terms_of

NUMEL = 1_000_000
"""Values of a fragment beside whose payloads the records of a round weigh little, but for topk's."""


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_is_as_long_as_is_counted(codec: str, request: pytest.FixtureRequest) -> None:
    terms = terms_of(codec)
    crowd = Crowd(open_store(f"memory://{request.node.name}"), terms, 1, NUMEL // 10)
    crowd.round()
    assert crowd.payload_bytes() == pytest.approx(traffic(terms, [NUMEL // 10], 2).up_bytes, rel=1e-3)


@pytest.mark.parametrize(("codec", "num_sites", "numel"), [("int8", 3, NUMEL), ("int4", 6, 2 * NUMEL)])
def test_a_round_moves_the_bytes_that_are_counted(
    codec: str, num_sites: int, numel: int, request: pytest.FixtureRequest
) -> None:
    terms = terms_of(codec)
    crowd = Crowd(open_store(f"memory://{request.node.name}"), terms, num_sites, numel)
    crowd.look_around()
    crowd.round()
    before = [meter.traffic() for meter in crowd.meters]
    crowd.round()
    after = [meter.traffic() for meter in crowd.meters]
    moved = traffic(terms, [numel], num_sites)
    ups = [now.bytes_up - was.bytes_up for now, was in zip(after, before, strict=True)]
    downs = [now.bytes_down - was.bytes_down for now, was in zip(after, before, strict=True)]
    assert max(ups) == pytest.approx(moved.up_bytes, rel=0.1)
    assert max(downs) == pytest.approx(moved.down_bytes, rel=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_joiner_fetches_no_more_masters_than_are_counted(momentum: float, request: pytest.FixtureRequest) -> None:
    terms = terms_of("int8", momentum=momentum)
    store = open_store(f"memory://{request.node.name}")
    crowd = Crowd(store, terms, 1, NUMEL)
    crowd.round()
    late = Crowd(store, terms, 2, NUMEL).meters[1].traffic()
    most = traffic(terms, [NUMEL], 2)
    assert 0 < late.bytes_down <= 1.1 * (most.join_bytes + most.down_bytes)


def test_seconds_are_bytes_by_bandwidth_and_fewer_with_more_of_it() -> None:
    moved = traffic(terms_of("fp32"), [NUMEL], 4)
    assert (moved.up_bytes, moved.down_bytes) == (4 * NUMEL, 12 * NUMEL)
    assert (seconds(moved.up_bytes, 32), seconds(moved.down_bytes, 32)) == (1.0, 3.0)
