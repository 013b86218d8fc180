"""A volunteer's whole command behind a shaped cable: what the bench notes, and in which order."""

import pytest

from composer_prime.errors import BadInput
from tests.bench.join import command as join_command
from tests.bench.join.command import Cell, cells_of

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}


def test_a_cell_is_made_for_every_codec_and_source_of_weights() -> None:
    cells = cells_of(["own", "bucket"], ["topk", "int8"], rate_mbit=5)
    assert [(cell.codec, cell.own_weights, cell.rate_mbit) for cell in cells] == [
        ("topk", True, 5),
        ("topk", False, 5),
        ("int8", True, 5),
        ("int8", False, 5),
    ]


def test_sources_that_there_are_not_are_refused() -> None:
    with pytest.raises(BadInput, match=r'--weights \(disk\) must be "own" .* or "bucket"'):
        cells_of(["disk"], ["topk"])


@pytest.mark.long
@pytest.mark.s3
@pytest.mark.usefixtures("links")
def test_a_volunteer_s_command_is_followed_from_its_start_to_its_first_merged_offer() -> None:
    cell = Cell(False, rate_mbit=20, after_rounds=1, model=SMALL)
    found = join_command.measure(cell)
    assert 0 < found.checked_s < found.launched_s < found.joined_s < found.stepped_s <= found.offered_s + 0.5
    assert found.offered_s < found.merged_s and found.steps == 2 and 0 < found.train_s < found.steps_s
    assert 0 < found.joined_down <= found.down and found.up > 0 and found.params < 10**6
    assert len(found.begins) == cell.fragments
    assert join_command.draw([(cell, found)]).row_count == 1
