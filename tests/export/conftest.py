"""The model that runs of these tests start from."""

from pathlib import Path

import pytest

from tests.sites.tiny_folder import save_random_tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, in a folder."""
    return save_random_tiny(tmp_path_factory.mktemp("base"))
