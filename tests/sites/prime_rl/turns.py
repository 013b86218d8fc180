"""Does a trainer's own time leave the outer loop's turns out? By what it logged, and what `own_losses` wrote down."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_prime.metrics import OUTER_TURN_S


def assert_turns_left_out(times: Path, records: Sequence[dict[str, Any]]) -> None:
    """A step's forward and backward and its turn fit between the turn before it and the loss after it.

    times     of Python's own clock, in one process: of each call of the loss, and of each turn's end
    records   the trainer's metrics
    """
    steps: list[dict[str, float]] = [{}]
    for what, when in map(json.loads, times.read_text().splitlines()):
        steps[-1].setdefault(what, when)
        if what == "step":
            steps.append({})
    logged: dict[int, dict[str, Any]] = {}
    for record in records:
        if "step" in record:
            logged.setdefault(record["step"], {}).update(record)
    assert len(steps) - 1 == len(logged) > 2
    for number in range(2, len(logged)):
        around = steps[number]["loss"] - steps[number - 2]["step"]
        assert logged[number]["time/forward_backward"] + logged[number][OUTER_TURN_S] <= around, number
