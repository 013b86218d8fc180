"""The benches measure what they say, on small sizes; what they print is for people and not asserted as times."""

from collections.abc import Callable

import pytest

from composer_prime.errors import ConfigError, SiteError
from composer_prime.store import keys, open_store
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Commit
from tests.bench.cells import measure_cells
from tests.bench.round import outer as bench_outer
from tests.bench.round import round as bench_round
from tests.bench.round.round import RoundBench


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
    told = capfd.readouterr().err
    assert "codec" in told and "input_value='none'" in told


def test_a_codec_that_there_is_not_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match=r'outer\.codec \("none"\) must be one of fp32'):
        bench_round.main(codec="none")


def test_a_bench_of_one_cell_draws_it_once_and_one_of_several_each_and_all(capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(*cells: str) -> str:
        measure_cells(cells, len, lambda results: f"rows: {len(results)}", lambda cell, found: {}, None)
        return capsys.readouterr().out

    assert drawn("one") == "rows: 1"
    assert drawn("one", "two") == "rows: 1rows: 1rows: 2\n"
