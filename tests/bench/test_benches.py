"""The benches measure what they say, on small sizes; what they print is for people and not asserted as times."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from composer_prime.bench import outer as bench_outer
from composer_prime.bench import round as bench_round
from composer_prime.bench import sweep
from composer_prime.bench.cells import measure_cells
from composer_prime.bench.round import RoundBench
from composer_prime.bench.sweep import Outcome, draw, draw_differences, read_outcome, run_once
from composer_prime.config.paths import RunPaths
from composer_prime.errors import BadInput, ConfigError, SiteError
from composer_prime.metrics import MetricsTape
from composer_prime.store import keys, open_store
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Commit


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


def test_a_sweep_compares_variants_seed_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def outcomes(*pairs: tuple[float, float | None]) -> list[Outcome]:
        return [Outcome(0.3, last, 0.8, 48, 6000, 60.0, held_out) for last, held_out in pairs]

    runs = {
        "fp32": outcomes((0.90, 0.80), (0.95, 0.90)),
        "int8": outcomes((0.91, 0.79), (0.96, 0.89)),
        "one site": outcomes((0.90, None), (0.97, None)),
    }
    Console(width=160).print(draw_differences(runs, "fp32"))
    lines = capsys.readouterr().out.splitlines()
    assert not any("fp32 " in line for line in lines[1:])
    assert any(all(part in line for part in ("int8", "+0.0100 +- 0.0000 *", "-0.0100 +- 0.0000 *")) for line in lines)
    assert any("one site" in line and "+0.0100 +- 0.1271" in line and line.endswith("- │") for line in lines)


def test_a_sweep_refuses_a_baseline_that_is_none_of_its_variants(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--baseline \(2\) must be 0 to 1"):
        sweep.main(["a.toml", "b.toml"], [0], tmp_path, baseline=2)
    with pytest.raises(BadInput, match="given twice"):
        sweep.main(["a.toml"], [0, 0], tmp_path)


@pytest.mark.slow
@pytest.mark.s3
def test_a_round_of_two_processes_is_timed_and_so_are_its_bytes_by_plain_s3fs(
    store_uri: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    uri = store_uri("seaweed")
    rounds, plain = bench_round.measure(RoundBench(uri, params=10_000, repeats=2, codec="fp32"))
    assert len(rounds) == len(plain) == 2 and min(*rounds, *plain) > 0
    store = open_store(uri)
    assert [len(read_record(store, Commit, keys.commit(0, number)).taken) for number in range(3)] == [2, 2, 2]
    assert len(store.list("plain/")) == 6 and len(store.get("plain/0/0")) == 40_000
    with pytest.raises(SiteError, match=r"site [ab] of the bench ended early with exit code 1"):
        bench_round.measure(RoundBench(f"{uri}/other", params=10_000, repeats=2, codec="none"))
    assert 'outer.codec ("none") must be one of' in capfd.readouterr().err


def test_a_codec_that_there_is_not_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match=r'outer\.codec \("none"\) must be one of fp32'):
        bench_round.main(codec="none")


def test_a_bench_of_one_cell_draws_it_once_and_one_of_several_each_and_all(capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(*cells: str) -> str:
        measure_cells(cells, len, lambda results: f"rows: {len(results)}", lambda cell, found: {}, None)
        return capsys.readouterr().out

    assert drawn("one") == "rows: 1"
    assert drawn("one", "two") == "rows: 1rows: 1rows: 2\n"
