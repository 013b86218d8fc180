"""A late site's way into a run over a real slow link: what it fetches, and that it ends on the others' masters."""

import re
from dataclasses import replace

import pytest

from composer_prime.errors import BadInput
from tests.bench.join import join
from tests.bench.join.join import Cell, cells_of
from tests.bench.link import network

SMALL = Cell(2, True, rate_mbit=20, inner_steps=16, sync_delay=1, params=800_000, step_s=0.02, snapshot_rounds=10**6)


def test_a_cell_is_made_for_every_codec_source_of_weights_and_number_of_rounds() -> None:
    cells = cells_of([3, 30], ["own", "bucket"], ["topk", "int8"], rate_mbit=5)
    assert len(cells) == 8 and {cell.rate_mbit for cell in cells} == {5}
    assert [(cell.codec, cell.own_weights, cell.after_rounds) for cell in cells[:3]] == [
        ("topk", True, 3),
        ("topk", True, 30),
        ("topk", False, 3),
    ]


def test_sources_and_codecs_that_there_are_not_are_refused() -> None:
    with pytest.raises(BadInput, match=r'--weights \(disk\) must be "own" .* or "bucket"'):
        cells_of([3], ["disk"], ["topk"])
    with pytest.raises(BadInput, match="nope"):
        cells_of([3], ["own"], ["nope"])


def test_without_root_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    with pytest.raises(BadInput, match="run it as root") as failure:
        join.main([SMALL])
    assert "\n" not in str(failure.value)


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.usefixtures("links")
def test_who_has_the_model_fetches_less_and_either_gets_in() -> None:
    found = {own: join.measure(replace(SMALL, own_weights=own)) for own in (True, False)}
    for measured in found.values():
        assert measured.masters_equal and measured.rounds >= 2
        assert measured.imported_s < measured.ready_s < measured.joined_s < measured.offered_s < measured.merged_s
        assert measured.wire_down > measured.object_down
    begins = {own: set(re.findall(r" at=(\w+)", " ".join(measured.begins))) for own, measured in found.items()}
    assert begins == {True: {"held"}, False: {"newest"}} and found[False].object_down > 0.9 * SMALL.params
    assert not [name for name in network._namespaces() if f"{network.PREFIX}{join.os.getpid()}-" in name]
    assert join.draw([(SMALL, found[True])]).row_count == 1
