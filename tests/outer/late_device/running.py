"""The simulated device's process, for as long as a module's tests need it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outer.late_device import build
from tests.outer.late_device.device import Process


def running(folder: Path) -> Iterator[Process]:
    """Compile the device in the folder and run it; skips the test where it can't be compiled. For `yield from`."""
    if (why := build.missing()) is not None:
        pytest.skip(why)
    process = Process(build.build(folder))
    try:
        yield process
    finally:
        process.end()
