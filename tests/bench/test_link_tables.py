"""What docs/benchmarks.md says `bench link` measured, against what `plan` predicts today: within 15 %."""

import re

import pytest

from composer_prime.outer.codecs import CODECS
from composer_prime.outer.forecast import Forecast, Pace, crowding, forecast, payloads_of
from tests.architecture import REPOSITORY

PARAMS = 30_800_000
MOST_OFF = 0.15
PAGE = (REPOSITORY / "docs" / "benchmarks.md").read_text()
SECTION = PAGE.partition("\n## Slow links\n")[2].partition("\n## ")[0]


def table(first_columns: str) -> list[list[str]]:
    """The rows of the section's table whose header begins so, cell by cell."""
    (header,) = [line for line in SECTION.splitlines() if line.startswith(f"| {first_columns} |")]
    lines = SECTION.partition(header)[2].lstrip("\n").partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


def predict(codec: str, rate: float, steps: int, delay: int, fragments: int = 4, sites: int = 4, params: int = PARAMS):
    """As the bench does on the two cores of which the page tells."""
    numels = [params * (block + 1) // fragments - params * block // fragments for block in range(fragments)]
    pace = Pace(steps, fragments, delay, 0.03, sites, crowding=crowding(2 / sites))
    return forecast(payloads_of(numels, codec), pace, codec, rate)


def assert_near(predicted: float, *measured: float, rounding: float = 0.0) -> None:
    """rounding: by how much what the page tells may differ from what was measured."""
    for value in measured:
        assert (value - rounding) * (1 - MOST_OFF) <= predicted <= (value + rounding) * (1 + MOST_OFF), value


GRID = table("codec | H")
BYTES = table("codec | MB sent")
OTHERS = table("Mbit/s | codec")


def test_the_page_has_every_cell_of_the_grid() -> None:
    assert sorted((codec, int(steps)) for codec, steps, *_ in GRID) == sorted((c, s) for c in CODECS for s in (32, 128))
    assert len(OTHERS) == 25 and any(row[3] == "0" for row in OTHERS) and any(row[3] == "127" for row in OTHERS)


@pytest.mark.parametrize("row", GRID, ids=lambda row: f"{row[0]}-{row[1]}")
def test_utilisation_of_every_codec_and_link_is_as_predicted(row: list[str]) -> None:
    codec, steps, *cells = row
    for rate, cell in zip((10, 50, 200, 1000), cells, strict=True):
        *measured, told = numbers(cell)
        found = predict(codec, rate, int(steps), int(steps) // 4 - 1)
        assert f"{100 * found.utilisation:.1f}" == f"{told:.1f}", "the page tells what plan says today"
        assert_near(100 * found.utilisation, *measured, rounding=0.05)


@pytest.mark.parametrize("row", BYTES, ids=lambda row: row[0])
def test_seconds_of_a_round_are_as_predicted(row: list[str]) -> None:
    """As multiples of the bound, which the page has with three digits also where next to no time is training."""
    for rate, cell in zip((10, 50, 200, 1000), row[7:11], strict=True):
        found = predict(row[0], rate, 32, 7)
        assert_near(found.round_s / found.bound_s, float(cell))


@pytest.mark.parametrize("row", BYTES, ids=lambda row: row[0])
def test_bytes_that_a_site_sends_and_fetches_are_as_predicted(row: list[str]) -> None:
    found = predict(row[0], 50, 128, 31)
    for nbytes, cell in zip((found.up_bytes, found.down_bytes), row[1:3], strict=True):
        measured, told = numbers(cell)
        assert round(nbytes / 1e6, 2 if told < 10 else 1) == told
        assert_near(nbytes / 1e6, measured)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: "-".join(row[:6]))
def test_seconds_and_utilisation_of_cells_that_fitted_nothing_at_first_are_as_predicted(row: list[str]) -> None:
    link, codec, *shape = row[:6]
    rate, *millions = numbers(link)
    steps, delay, fragments, sites = map(int, shape)
    params = int(1e6 * millions[0]) if millions else PARAMS
    found: Forecast = predict(codec, rate, steps, delay, fragments, sites, params)
    round_s, told_s, _, utilisation, told, _ = (numbers(cell)[0] for cell in row[6:12])
    assert (f"{found.round_s:.2f}", f"{100 * found.utilisation:.1f}") == (f"{told_s:.2f}", f"{told:.1f}")
    assert_near(found.round_s, round_s)
    assert_near(100 * found.utilisation, utilisation)
