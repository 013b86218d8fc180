"""The benches measure what they say, on small sizes; what they print is for people and not asserted as times."""

import json
from pathlib import Path

import pytest

from composer_prime.bench import outer as bench_outer
from composer_prime.bench.sweep import Outcome, draw, read_outcome, run_once
from composer_prime.config.paths import RunPaths
from composer_prime.errors import SiteError
from composer_prime.metrics import MetricsTape
from composer_prime.store import keys, open_store


def test_bench_outer_measures_every_phase_of_real_rounds() -> None:
    store = open_store("memory://bench-outer")
    times = bench_outer.measure(store, params=1000, repeats=2, codec="int8")
    assert set(times) == set(bench_outer.PHASES)
    assert all(len(values) == 2 and min(values) > 0 for values in times.values())
    assert keys.commit(0, 2) in store.list(keys.round_prefix(0, 2))  # one round to warm up, two measured


def test_bench_outer_prints_sizes_and_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    bench_outer.main(params=2560, repeats=1, codec="int8")
    printed = capsys.readouterr().out
    assert "payload 2,600 bytes (3.94x smaller than fp32); load " in printed


def test_a_sweep_reads_a_run_as_means_over_its_sites(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    rewards = {"a": [0.25, 0.5], "b": [0.75, 1.0]}
    sites = {name: {"reward_first": each[0], "reward_last": each[1], "steps": 2} for name, each in rewards.items()}
    for name, each in rewards.items():
        with MetricsTape(paths.site(name).tape("orchestrator")) as tape:
            for step, reward in enumerate([*each, 0.0]):  # the last one was never trained on
                tape.log(step, **{"rollout/reward": reward, "rollout/count": 64})
        with MetricsTape(paths.site(name).tape("trainer")) as tape:
            for step in range(2):
                tape.log(step, **{"train/tokens": 10})
    paths.summary.write_text(json.dumps({"sites": sites, "wall_s": 12.5}))
    assert read_outcome(paths) == Outcome(0.5, 0.75, 0.625, 2, 256, 12.5)
    assert draw({"recipe": [read_outcome(paths)]}, [0]).row_count == 1


def test_a_sweep_stops_at_a_run_that_fails_and_shows_why(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"ended with 2(.|\n)*none\.toml"):
        run_once("none.toml", 0, tmp_path, "sweep-0-0")
