"""The script of a launch's weight, and the bar that it holds: at most 30 functions wait for a client's call."""

from pathlib import Path

import pytest

from tests.bench.launch_weight import functions, lines_of
from tests.executors.registry import PLATFORM_PARAMS


@pytest.mark.parametrize("name", PLATFORM_PARAMS)
def test_few_functions_lie_between_a_supervisors_turn_and_the_clients_call(name: str, tmp_path: Path) -> None:
    entered, waiting = functions(name, tmp_path)
    assert 5 < waiting <= 30 and waiting < entered


def test_lines_are_those_of_the_rooms_files() -> None:
    assert 1000 < lines_of("launch") < lines_of("executors")
