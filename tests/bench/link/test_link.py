"""The bench of links, and one real run over shaped links whose bytes `plan` must have counted."""

import json
from pathlib import Path

import pytest

from composer_prime.errors import BadInput
from tests.bench.link import link, network
from tests.bench.link.link import Cell, grid


def test_a_grid_takes_the_longest_delay_by_itself_and_refuses_a_longer_one() -> None:
    cells = grid([10, 50], ["topk", "int8"], [32, 128], None, fragments=4)
    assert len(cells) == 8 and {(cell.inner_steps, cell.sync_delay) for cell in cells} == {(32, 7), (128, 31)}
    with pytest.raises(BadInput, match=r"--sync-delay \(8\) must be smaller than .* \(32 / 4\)"):
        grid([10], ["topk"], [32], [8], fragments=4)
    with pytest.raises(BadInput, match="a whole number"):
        grid([10], ["topk"], [30], [1], fragments=4)


def test_without_root_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    with pytest.raises(BadInput, match="run it as root") as failure:
        link.main([Cell(50, "int8", 8, 1)])
    assert failure.value.exit_code == 2 and "\n" not in str(failure.value)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(BadInput, match="needs ip and tc: install iproute2"):
        link.main([Cell(50, "int8", 8, 1)])


def test_what_sites_report_is_counted_for_a_round_and_utilisation_is_the_share_of_training() -> None:
    cell = Cell(50, "int8", 32, 7, sites=3, rounds=2)
    names = ("object_up", "object_down", "wire_up", "wire_down", "turn_s", "wait_s", "other_s", "late_s", "cpu_s")
    reports = [
        {"at_s": at_s, "masters": [[5, "one"]], **{name: 10 * place + site for place, name in enumerate(names)}}
        for site, at_s in enumerate((3.0, 4.0, 9.0))
    ]
    found = link._summed(cell, reports, finish=True)
    assert (found.round_s, found.utilisation) == (2.0, pytest.approx(32 * 0.03 / 2.0)), "the middle site's"
    assert [found.up_bytes, found.down_bytes, found.wire_up, found.wire_down] == [0.5, 5.5, 10.5, 15.5]
    assert [found.turn_s, found.wait_s, found.other_s, found.late_s, found.cpu_s] == [20.5, 25.5, 30.5, 35.5, 40.5]
    assert found.masters_equal


def test_masters_differ_where_two_of_one_version_do_and_at_the_end_where_versions_do() -> None:
    def equal(*masters: list[list[object]], finish: bool = False) -> bool:
        return link.masters_equal(masters, finish)

    one, same, later, other = [[5, "x"], [4, "y"]], [[5, "x"], [4, "y"]], [[5, "x"], [5, "z"]], [[5, "x"], [4, "?"]]
    assert equal(one, same, finish=True) and not equal(one, other)
    assert equal(one, later) and not equal(one, later, finish=True)
    assert not equal(one, later, other)


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.usefixtures("links")
def test_two_sites_over_real_links_move_the_predicted_bytes_and_end_equal(tmp_path: Path) -> None:
    cell = Cell(50, "int8", 32, 7, sites=2, params=1_000_000, rounds=2)
    found = link.measure(cell, finish=True)
    expected = cell.traffic()
    assert found.masters_equal
    assert found.up_bytes == pytest.approx(expected.up_bytes, rel=0.1)
    assert found.down_bytes == pytest.approx(expected.down_bytes, rel=0.1)
    assert found.round_s >= cell.bound_s and 0 < found.utilisation <= 1
    assert not [name for name in network._namespaces() if f"{network.PREFIX}{link.os.getpid()}-" in name]
    (tmp_path / "out.json").write_text(json.dumps(link._record(cell, found)))
    assert link.draw([(cell, found)]).row_count == 1
