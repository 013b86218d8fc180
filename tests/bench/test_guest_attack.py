"""The bench of one guest: it runs what the page says, and its hostile offers are taken and bounded."""

from pathlib import Path

import pytest

from tests.architecture import REPOSITORY
from tests.bench.guest_attack import GUEST, Run, play

MOST_LINES = 90


def test_what_host_and_volunteer_do_takes_at_most_90_lines() -> None:
    page = (REPOSITORY / "docs/volunteers.md").read_text()
    assert len(page[page.index("\n## Host\n") :].strip().splitlines()) <= MOST_LINES


@pytest.mark.slow
def test_in_a_run_as_documented_a_guest_that_offers_twice_the_way_back_moves_half_as_far_as_the_owners_site(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run", seed=0, members="a", arm="against")
    run.prepare(rounds=8)
    play([run])
    rounds = [{entry.site: entry for entry in commit.taken} for commit in run.commits()]
    pairs = [(taken["a"], taken[GUEST]) for taken in rounds if GUEST in taken]
    assert pairs, run.fates()
    for own, theirs in pairs:
        assert theirs.offer.norm == pytest.approx(2 * own.offer.norm, rel=0.1)
        assert theirs.multiplier * theirs.offer.norm <= own.multiplier * own.offer.norm / 2 * (1 + 1e-5)
