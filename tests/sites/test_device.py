"""`site.device`: a site on another device than the CPU, here a simulated one, and a device that isn't there."""

from collections.abc import Callable, Iterator

import pytest

from tests.outer.late_device import build
from tests.outer.late_device.device import LateDevice, Process
from tests.sites.late_site import SITE_CLAIMS


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    if (why := build.missing()) is not None:
        pytest.skip(why)
    process = Process(build.build(tmp_path_factory.mktemp("late_device")))
    try:
        yield process
    finally:
        process.end()


@pytest.mark.parametrize("claim", SITE_CLAIMS, ids=lambda claim: claim.__name__)
def test_on_the_simulated_device(claim: Callable[[LateDevice], None], late: Process) -> None:
    if (failure := late.failure(claim)) is not None:
        pytest.fail(failure, pytrace=False)
