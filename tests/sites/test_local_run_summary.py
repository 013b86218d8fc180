"""Tapes and results in, numbers out: what is shown while sites run, and what a run came to."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from composer_prime.config import RunPaths, SitePaths
from composer_prime.metrics import SITE_WALL_S, MetricsTape
from composer_prime.sites.embedded.progress import Screen, SiteNumbers, SiteProgress, draw_line, draw_table
from composer_prime.sites.embedded.result import MasterVersion, SiteResult
from composer_prime.sites.embedded.summary import (
    covered_s,
    draw_summary,
    dropped_lines,
    round_steps,
    smooth,
    teacher_lines,
    write_summary,
)

REWARDS = [0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.7]


def write_tapes(paths: SitePaths, rewards: list[float] = REWARDS, first: int = 0) -> None:
    """Both tapes of a site, a record a step; a round is merged every other step."""
    with MetricsTape(paths.tape("orchestrator")) as rollouts, MetricsTape(paths.tape("trainer")) as training:
        for step, reward in enumerate(rewards, first):
            rollouts.log(step, **{"rollout/reward": reward, "rollout/per_s": 30.0 + step})
            training.log(step, **{"train/tokens": 100, "train/step_s": 0.5, "train/train_s": 0.4})
            training.log(step, **{"outer/stall_s": 0.01, "outer/round": step // 2})


def write_result(paths: SitePaths, sha256: str = "ab" * 32) -> None:
    paths.root.mkdir(parents=True, exist_ok=True)
    masters = {"0": MasterVersion(version=2, sha256=sha256), "1": MasterVersion(version=1, sha256="cd" * 32)}
    counts = {"steps": 8, "tokens": 812, "outer_rounds": 3, "bytes_up": 1500, "bytes_down": 2_500_000}
    SiteResult(**counts, master_sha256=masters, stall_s=0.08, train_s=3.2).save(paths.result)


def write_wall(paths: SitePaths, wall_s: float) -> None:
    with MetricsTape(paths.tape("supervisor")) as tape:
        tape.log(0, **{SITE_WALL_S: wall_s})


def test_numbers_follow_a_tape_while_it_grows(tmp_path: Path) -> None:
    paths = SitePaths(tmp_path)
    progress = SiteProgress(paths)
    assert progress.update().step == 0 and math.isnan(progress.update().reward)
    write_tapes(paths, REWARDS[:4])
    numbers = progress.update()
    assert (numbers.step, numbers.rounds) == (4, 1)
    assert numbers.reward == pytest.approx((0.2 + 0.3 + 0.5) / 3)
    assert numbers.rollouts_per_s == pytest.approx(32)
    assert numbers.tokens_per_s == pytest.approx(200)
    assert numbers.stall == pytest.approx(0.02)
    write_tapes(paths, REWARDS[4:], first=4)
    assert progress.update().step == 8


def test_a_site_that_mostly_waits_is_stalled_for_less_than_all_of_its_time(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    with MetricsTape(run.site("a").tape("trainer")) as training:
        for step in range(4):
            training.log(step, **{"train/tokens": 100, "train/step_s": 3.0, "train/train_s": 1.0, "outer/stall_s": 1.8})
    assert SiteProgress(run.site("a")).update().stall == pytest.approx(0.6)
    shown = io.StringIO()
    Console(file=shown, width=200).print(draw_summary(write_summary(run)))
    assert "60.0 %" in shown.getvalue()


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    paths = SitePaths(tmp_path)
    write_tapes(paths, REWARDS[:1])
    progress = SiteProgress(paths)
    progress.update()
    with paths.tape("trainer").open("a") as tape:
        tape.write('{"step": 1, "time": 0, "train/')
        tape.flush()
        assert progress.update().step == 1
        tape.write('tokens": 7}\n')
    assert progress.update().step == 2


def test_a_step_trained_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    write_tapes(run.site("a"), [0.0] * 6)
    write_tapes(run.site("a"), [1.0] * 4, first=4)
    site = write_summary(run)["sites"]["a"]
    assert (site["steps"], site["tokens"]) == (8, 800)
    assert (site["reward_first"], site["reward_last"]) == (0.0, 1.0)


def test_a_summary_holds_what_each_site_came_to(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "two")
    for site in "ab":
        write_tapes(run.site(site))
        write_result(run.site(site))
        write_wall(run.site(site), 40.0)
    summary = write_summary(run)
    assert json.loads(run.summary.read_text()) == summary
    assert summary["masters_equal"] is True
    assert summary["sites"]["a"] == {
        "finished": True,
        "reward_first": 0.2,
        "reward_last": 0.8,
        "steps": 8,
        "tokens": 812,
        "dropped_tokens": 0,
        "outer_rounds": 3,
        "master_sha256": {"0": {"version": 2, "sha256": "ab" * 32}, "1": {"version": 1, "sha256": "cd" * 32}},
        "bytes_up": 1500,
        "bytes_down": 2_500_000,
        "stall_s": 0.08,
        "finish_s": 0.0,
        "train_s": 3.2,
        "step_s": 4.0,
        "wall_s": 40.0,
    }
    assert summary["wall_s"] == pytest.approx(40, abs=1)


def test_rollouts_that_were_never_trained_on_or_all_failed_have_no_say(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    write_tapes(run.site("a"), [0.5, math.nan, 0.5, 0.5])
    with MetricsTape(run.site("a").tape("orchestrator")) as rollouts:
        rollouts.log(4, **{"rollout/reward": 1.0})
    assert write_summary(run)["sites"]["a"]["reward_last"] == 0.5


def test_what_no_round_took_is_said_with_its_reasons() -> None:
    sites = {
        "a": {"dropped_tokens": 1234, "tokens": 9876},
        "b": {"dropped_tokens": 0, "tokens": 1},
        "c": {"dropped_tokens": None},
    }
    (line,) = dropped_lines({"sites": sites})
    assert line.startswith("site a: 1,234 of its 9,876 tokens are in no round, since the run was over")


def test_different_masters_are_told(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    write_result(run.site("a"))
    write_result(run.site("b"), sha256="ef" * 32)
    assert write_summary(run)["masters_equal"] is False


def test_a_site_without_a_result_is_summed_up_from_its_tapes(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    write_tapes(run.site("a"))
    summary = write_summary(run)
    site = summary["sites"]["a"]
    assert not site["finished"] and summary["masters_equal"] is None
    assert (site["steps"], site["tokens"], site["outer_rounds"], site["bytes_up"]) == (8, 800, 3, None)


def test_a_run_that_never_stepped_has_a_summary_of_nulls_and_no_picture(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    run.site("a").root.mkdir(parents=True)
    site = write_summary(run)["sites"]["a"]
    assert site["reward_first"] is None and site["steps"] == 0
    assert not run.reward_plot.exists()


def test_rounds_are_marked_where_their_count_grows() -> None:
    assert round_steps({0: 0, 1: 1, 2: 1, 4: 3, 3: 1}) == {1, 4}
    assert smooth([1.0, 2.0, 3.0, 7.0]) == [1.0, 1.5, 2.0, 4.0]


def test_wall_time_counts_what_overlaps_once_and_gaps_not_at_all() -> None:
    assert covered_s([(0, 10), (2, 12), (100, 105)]) == 17
    assert covered_s([(0, 10), (2, 3)]) == 10
    assert covered_s([]) == 0


NUMBERS = SiteNumbers(step=4, reward=0.5, rollouts_per_s=40.4, tokens_per_s=math.nan, rounds=2, stall=0.0123)


def test_without_a_terminal_each_site_is_a_line_that_is_never_wrapped() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, width=20), 8, lambda: {"a": ("running", NUMBERS)}) as screen:
        screen.update()
        screen.update()
    line = "site=a state=running step=4/8 reward=0.500 rollouts/s=40 tokens/s=- fragment_rounds=2 stall=1.2%"
    assert draw_line("a", "running", NUMBERS, 8) == line
    assert out.getvalue().splitlines() == [line, line]  # one when due, one at the end


def test_on_a_terminal_a_table_is_drawn_and_messages_stay_above_it() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with Screen(console, 8, lambda: {"a": ("running", NUMBERS)}) as screen:
        screen.update()
        screen.say("site b failed: gone")
    assert "site b failed: gone" in out.getvalue()
    assert "rollouts/s" in out.getvalue() and "4/8" in out.getvalue()


def test_a_site_whose_rollouts_mostly_fail_says_so(tmp_path: Path) -> None:
    progress = SiteProgress(SitePaths(tmp_path))
    with MetricsTape(SitePaths(tmp_path).tape("orchestrator")) as tape:
        for step, failed in enumerate((2, 2, 7, 7, 7)):
            tape.log(step, **{"rollout/reward": 0.5, "rollout/count": 8 - failed, "rollout/failed": failed})
            numbers = progress.update()
            out = io.StringIO()
            Console(file=out, width=160).print(draw_table({"a": ("running", numbers)}, 8))
            share = {2: " failed=46%", 3: " failed=67%", 4: " failed=88%"}.get(step, "")
            share = share if numbers.failed > 0.5 else ""
            assert draw_line("a", "running", numbers, 8).endswith(f"%{share}")
            assert ("of its rollouts fail, see its logs/orchestrator.log" in out.getvalue()) is bool(share)
    assert numbers.failed == 7 / 8


def test_how_far_each_teacher_was_heard_is_summed_up_and_drawn(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    write_tapes(run.site("a"))
    write_summary(run)
    plain = run.reward_plot.read_bytes()
    with MetricsTape(run.site("a").tape("orchestrator")) as tape:
        for step, weight in enumerate((0.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0)):
            probes = {"teacher/big/probes": 3} if step < 4 else {}
            tape.log(step, **{"teacher/big/weight": weight, "teacher/big/better": 0.1, **probes})
    summary = write_summary(run)
    assert run.reward_plot.read_bytes() != plain
    assert list(teacher_lines(summary)) == [
        "site a: teacher big was heard at 50% of its turns at first and at 0% at last; 12 rollouts compared it with "
        "the policy"
    ]


def write_tools(paths: SitePaths, shares: list[float]) -> None:
    """A step's rollouts each make ten calls, of which such a share fails."""
    with MetricsTape(paths.tape("orchestrator")) as tape:
        for step, share in enumerate(shares):
            tape.log(step, **{"rollout/reward": 0.5, "tools/calls": 10, "tools/errors": 10 * share})


def test_the_share_of_failed_tool_calls_is_summed_up_and_drawn_where_there_are_calls(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    write_tapes(run.site("a"))
    without = write_summary(run)
    assert not {"tool_errors_first", "tool_errors_last"} & without["sites"]["a"].keys()
    plain = run.reward_plot.read_bytes()
    write_tools(run.site("a"), [0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.1, 0.0, 0.9])  # the last was never trained on
    site = write_summary(run)["sites"]["a"]
    assert (site["tool_errors_first"], site["tool_errors_last"]) == (0.5, 0.1)
    assert run.reward_plot.read_bytes() != plain
    shown = io.StringIO()
    Console(file=shown, width=200).print(draw_summary(write_summary(run)))
    assert "errors first" in shown.getvalue() and "0.500" in shown.getvalue()
