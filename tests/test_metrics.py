"""The metrics tape: what is logged is read back, also while it is written."""

import json
import math
from pathlib import Path

from composer_prime import metrics
from composer_prime.metrics import MetricsTape, read_tape


def test_a_tape_reads_back_what_was_logged_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "trainer.jsonl"
    with MetricsTape(path) as tape:
        tape.log(1, **{metrics.TRAIN_LOSS: 0.5, metrics.OUTER_STALL_S: 0})
        tape.log(2, **{metrics.TRAIN_LOSS: math.nan})
    with MetricsTape(path) as tape:
        tape.log(3)
    first, second, third = read_tape(path)
    assert (first["step"], first["train/loss"], first["outer/stall_s"]) == (1, 0.5, 0.0)
    assert math.isnan(second["train/loss"])
    assert third["step"] == 3 and first["time"] <= third["time"]


def test_a_tape_is_json_also_where_a_value_is_not_finite(tmp_path: Path) -> None:
    with MetricsTape(tmp_path / "tape.jsonl") as tape:
        tape.log(1, **{metrics.LOSS_KL: math.inf})
    record = json.loads((tmp_path / "tape.jsonl").read_text(), parse_constant=lambda name: 1 / 0)
    assert record["loss/kl"] is None


def test_a_line_that_is_still_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    with MetricsTape(path) as tape:
        tape.log(1)
    with path.open("a") as file:
        file.write('{"step": 2, "ti')
    assert [record["step"] for record in read_tape(path)] == [1]


def test_an_absent_tape_is_empty(tmp_path: Path) -> None:
    assert read_tape(tmp_path / "none.jsonl") == []


def test_metric_names_differ_and_have_a_group() -> None:
    names = [value for name, value in vars(metrics).items() if name.isupper()]
    assert len(names) == len(set(names)) >= 20
    assert all(name.count("/") == 1 for name in names)
