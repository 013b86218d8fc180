"""The loop: what is finished is kept, what failed is made by the same call later, and the report says all."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from composer_prime.ablate.ablation import ablate, dry_run
from composer_prime.ablate.plan import Job, plan_jobs
from composer_prime.ablate.report import write_report
from composer_prime.config.ablate import read_arms
from composer_prime.config.paths import RunPaths
from composer_prime.errors import BadInput, SiteError, StoreError
from composer_prime.sites.embedded.folder import claim_run_folder
from tests.ablate.arms import HINTS, TEACHERS, FakeRunner, row_of, write_recipe

HELD_OUT = {"base": (0.2, 0.3, 0.4), "+hint": (0.3, 0.5, 0.7), "+replay": (0.2, 0.3, 0.4), "full": (0.05, 0.05, 0.05)}


def jobs_in(folder: Path, *tables: str, num_seeds: int = 3, prompts: int = 8, **overrides: object) -> Sequence[Job]:
    settings = [f"--{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    arms = read_arms(write_recipe(folder, *(tables or (HINTS,))), settings, harm=False)
    return plan_jobs(arms, num_seeds, prompts)


def screen() -> Console:
    return Console(file=io.StringIO(), width=140)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def told(job: Job) -> float:
    return HELD_OUT[job.arm.name][job.seed]


def test_every_arm_and_seed_is_run_once_seed_by_seed_with_time_left_told(tmp_path: Path):
    runner, console = FakeRunner(), screen()
    assert ablate(jobs_in(tmp_path, num_seeds=2), runner, console) == 0
    assert runner.given == ["base seed 0", "+hint seed 0", "base seed 1", "+hint seed 1"]
    lines = [line for line in text(console).splitlines() if line.startswith("[")]
    assert [line.partition(":")[0] for line in lines] == [
        f"[{number}/4] {label}" for number, label in enumerate(runner.given, 1)
    ]
    assert "elapsed, about 2 min 30 s left" in lines[0]  # 50 s each
    assert lines[-1].endswith("about 0 s left")


def test_what_was_stopped_goes_on_with_the_runs_that_are_left(tmp_path: Path):
    first = FakeRunner(lambda job: None if job.label == "base seed 1" else 0.5)
    assert ablate(jobs_in(tmp_path, num_seeds=2), first, screen()) == 130
    second, console = FakeRunner(), screen()
    assert ablate(jobs_in(tmp_path, num_seeds=2), second, console) == 0
    assert second.given == ["base seed 1", "+hint seed 1"]
    assert "2 of 4 runs are done already" in text(console)
    third = FakeRunner()
    assert ablate(jobs_in(tmp_path, num_seeds=3), third, screen()) == 0
    assert third.given == ["base seed 2", "+hint seed 2"]


@pytest.mark.parametrize("kind", [SiteError, BadInput, StoreError])
def test_a_failed_run_is_said_the_others_are_made_and_it_is_tried_again_the_next_time(
    tmp_path: Path, kind: type[Exception]
):
    console = screen()
    runner = FakeRunner(lambda job: kind("no teacher\n  there") if job.label == "+hint seed 0" else 0.5)
    assert ablate(jobs_in(tmp_path, num_seeds=2), runner, console) == 1
    assert len(runner.given) == 4 and "+hint seed 0 failed: no teacher" in text(console)
    folder = tmp_path / "out" / "test-ablation"
    page, data = (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text())
    assert "Missing: +hint seed 0." in page and "\n- +hint seed 0 failed: no teacher" in page
    assert list(data["failed"]) == ["+hint seed 0"] and len(data["rows"]) == 3
    again = FakeRunner()
    assert ablate(jobs_in(tmp_path, num_seeds=2), again, screen()) == 0
    assert again.given == ["+hint seed 0"]
    assert "failed" not in (folder / "report.md").read_text()


def test_rows_of_another_recipe_are_refused_and_stay(tmp_path: Path):
    ablate(jobs_in(tmp_path), FakeRunner(), screen())
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match="holds base seed 0 of another recipe"):
        jobs_in(tmp_path, trainer__optim__lr=0.5)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_cut_run_of_another_recipe_is_refused_too(tmp_path: Path):
    (job, *_) = jobs_in(tmp_path)
    claim_run_folder(job.recipe, resume=False).take()
    assert RunPaths.of(job.recipe).recipe.exists() and jobs_in(tmp_path)[0].finished() is None
    with pytest.raises(BadInput, match="holds base seed 0 of another recipe"):
        jobs_in(tmp_path, max_steps=9)


def test_other_held_out_tasks_are_judged_anew(tmp_path: Path):
    ablate(jobs_in(tmp_path, num_seeds=1), FakeRunner(), screen())
    runner = FakeRunner()
    ablate(jobs_in(tmp_path, num_seeds=1, prompts=9), runner, screen())
    assert runner.given == ["base seed 0", "+hint seed 0"]


def test_a_dry_run_makes_no_run_and_predicts_from_finished_ones_of_the_same_arm(tmp_path: Path):
    jobs = jobs_in(tmp_path, num_seeds=2)

    def shown() -> list[str]:
        console = screen()
        dry_run(jobs, console, usd_per_hour=36)
        return [" ".join(line.replace("│", " ").split()) for line in text(console).splitlines()]

    assert {"base 0 to do - -", "left 4 runs - -"} <= set(shown()) and not (tmp_path / "out").exists()
    for job in jobs[:2]:
        job.row.parent.mkdir(parents=True, exist_ok=True)
        job.row.write_text(row_of(job, 0.5, run_s=3590.0 if job.arm.name == "+hint" else 40.0).model_dump_json())
    lines = shown()
    assert {"base 0 done 50 s 0.5000", "base 1 to do 50 s 0.5000", "+hint 1 to do 1 h 00 min 36.00"} <= set(lines)
    assert "left 2 runs 1 h 00 min 36.50" in lines and not jobs[2].row.exists()


def test_the_report_tells_intervals_and_differences_in_one_table(tmp_path: Path):
    jobs = jobs_in(tmp_path, HINTS, TEACHERS)
    assert ablate(jobs, FakeRunner(told), screen(), usd_per_hour=36) == 0
    folder = tmp_path / "out" / "test-ablation"
    data = json.loads((folder / "report.json").read_text())
    base, hint, replay, full = data["arms"]
    assert base["held_out"]["value"] == pytest.approx(0.3)
    assert base["held_out"]["high"] - 0.3 == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert hint["minus_base"]["value"] == pytest.approx(0.2)  # 0.1, 0.2, 0.3
    assert hint["minus_base"]["high"] - 0.2 == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert replay["minus_base"] == pytest.approx({"value": 0.0, "low": 0.0, "high": 0.0})
    assert base["minus_base"] is None and base["area"]["value"] == pytest.approx(0.25)
    assert full["dollars"] == pytest.approx(0.5)  # 50 s at a cent a second
    assert len(data["rows"]) == 12 and data["rows"][0]["dollars"] == pytest.approx(0.5)
    page = (folder / "report.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("| +hint ")]
    assert line.startswith("| +hint | 3 | 0.500 [0.003, 0.997] | +0.200 [-0.048, +0.448] | 0.250 [")
    assert "`--replay.teachers=[]`" in page and "Price: 36 USD an hour" in page
    assert "(held_out.png)" in page and (folder / "held_out.png").read_bytes().startswith(b"\x89PNG")
    write_report(jobs, {job: row_of(job, 0.5) for job in jobs[:1]}, {})
    page, data = (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text())
    assert "Price: unknown" in page and [data["arms"][0][key] for key in ("dollars", "minus_base")] == [None, None]
    assert data["arms"][0]["held_out"] == {"value": 0.5, "low": None, "high": None}


def test_an_arm_that_did_harm_has_a_line_at_the_top_and_one_within_the_noise_has_none(tmp_path: Path):
    jobs = jobs_in(tmp_path, HINTS, TEACHERS)
    held_out = {"base": 0.9, "+hint": 0.5, "+replay": 0.88, "full": 0.95}
    rows = {
        job: row_of(job, held_out[job.arm.name] + job.seed * (0.01 if job.arm.name != "+replay" else -0.03))
        for job in jobs
    }
    jobs[0].folder.mkdir(parents=True)
    page = write_report(jobs, rows, {}).read_text()
    (line,) = [line for line in page.splitlines() if "is worse than" in line]
    assert line.startswith("**+hint is worse than base**: -0.400 [-0.4")
    assert page.index(line) < page.index("| arm |")


def test_the_report_says_of_a_run_whose_teachers_fell_silent_for_how_many_tokens(tmp_path: Path):
    jobs = jobs_in(tmp_path, TEACHERS, num_seeds=1)
    rows = {job: row_of(job, 0.5, unanswered_tokens=40 if job.arm.name == "+replay" else 0) for job in jobs}
    jobs[0].folder.mkdir(parents=True)
    page = write_report(jobs, rows, {}).read_text()
    assert [line for line in page.splitlines() if "no teacher answered" in line] == [
        "- +replay seed 0: no teacher answered for 40 of 1,000 generated tokens"
    ]
