"""What stands before a site's processes start."""

import sys
from pathlib import Path

from composer_prime.config.paths import RunPaths
from composer_prime.sites.embedded.prepare import ModelResolution


def test_two_sites_of_one_folder_that_start_at_once_each_get_their_own_answer(tmp_path: Path) -> None:
    first = ModelResolution([sys.executable, "-c", "print('/model')"], RunPaths(tmp_path))
    assert first._child.wait(60) == 0
    second = ModelResolution([sys.executable, "-c", "print('loading'); print('/other')"], RunPaths(tmp_path))
    try:
        assert first.wait(lambda: False) == Path("/model")
        assert second.wait(lambda: False) == Path("/other")
    finally:
        first.stop()
        second.stop()
    assert list((tmp_path / "logs").glob("*.out")) == []
