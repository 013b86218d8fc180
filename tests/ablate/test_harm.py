"""Arms that look for harm: which there are, what each of their runs gets, and what is said of those left out."""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from composer_prime.ablate.ablation import ablate, dry_run
from composer_prime.ablate.plan import Job, Row, plan_jobs
from composer_prime.ablate.report import write_report
from composer_prime.ablate.runner import run_job, start_of, teacher_served
from composer_prime.bearer import headers, user_token
from composer_prime.config.ablate import effective, left_out, read_arms, tasks_of
from composer_prime.config.recipe import Recipe
from composer_prime.config.settings import sampling_seed
from composer_prime.errors import BadInput, SiteError
from composer_prime.sites.embedded.broadcasts import publish
from composer_prime.sites.embedded.model import load_policy
from composer_prime.sites.embedded.ports import is_free, listen
from tests.ablate.arms import HINTS, PAIRS, TEACHERS, FakeRunner, row_of, write_recipe
from tests.sites.tiny_folder import save_random_tiny

HARM = ["placebo", "wrong-hint", "weak-teacher", "permuted", "restart"]
NO_TEACHER = "left out: weak-teacher, permuted: the recipe has no replay teacher"
NO_HINTS = "left out: wrong-hint: the recipe has no hints"
PROMPTS = ([5, 17, 3, 99], [140, 8, 61, 5])


def jobs_in(folder: Path, *tables: str, num_seeds: int = 1, overrides: Sequence[str] = ()) -> dict[str, list[Job]]:
    """The jobs of a recipe's arms, by arm, in the order of their seeds."""
    found: dict[str, list[Job]] = {}
    for job in plan_jobs(read_arms(write_recipe(folder, *(tables or (HINTS, TEACHERS))), overrides), num_seeds, 8):
        found.setdefault(job.arm.name, []).append(job)
    return found


def told(run: Callable[..., object], *arguments: Any) -> str:
    """What `ablate` or `dry_run` prints."""
    console = Console(file=io.StringIO(), width=140)
    run(*arguments, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("tables", "names", "reasons"),
    [
        ((HINTS, TEACHERS), HARM, []),
        ((HINTS,), ["placebo", "wrong-hint", "restart"], [NO_TEACHER]),
        ((TEACHERS,), ["placebo", "weak-teacher", "permuted", "restart"], [NO_HINTS]),
        ((PAIRS,), ["placebo", "restart"], [NO_HINTS, NO_TEACHER]),
        (
            (HINTS, "shuffle = true\n"),
            ["placebo", "restart"],
            ["left out: wrong-hint: its hints are shuffled already", NO_TEACHER],
        ),
    ],
)
def test_arms_that_look_for_harm_follow_from_the_signals_and_those_left_out_are_told(
    tmp_path: Path, tables: tuple[str, ...], names: list[str], reasons: list[str]
) -> None:
    recipe = write_recipe(tmp_path, *tables)
    arms, without = read_arms(recipe, [], ["slow seq_len=64"]), read_arms(recipe, [], ["slow seq_len=64"], harm=False)
    signals = [arm.name for arm in without[:-1]]
    assert [arm.name for arm in arms] == [*signals, *names, "slow"]
    assert left_out(arms) == reasons and left_out(without) == []
    assert len({arm.sha256 for arm in arms}) == len(arms)


def test_a_recipe_without_signals_has_none_and_nothing_is_said_of_them(tmp_path: Path) -> None:
    arms = read_arms(write_recipe(tmp_path), [], ["slow seq_len=64"])
    assert [arm.name for arm in arms] == ["base", "slow"] and left_out(arms) == []


def test_a_further_arm_of_the_same_name_takes_the_place_of_ours(tmp_path: Path) -> None:
    arms = read_arms(write_recipe(tmp_path, HINTS, TEACHERS), [], ["permuted seq_len=64", "restart seq_len=65"])
    assert [arm.name for arm in arms[4:]] == ["placebo", "wrong-hint", "weak-teacher", "permuted", "restart"]
    assert [arm.harm for arm in arms[-2:]] == [None, None] and arms[-2].recipe.seq_len == 64
    assert all(job.before == () for job in plan_jobs(arms, 1, 8)) and left_out(arms) == []


def test_each_trains_the_recipe_with_one_thing_wrong(tmp_path: Path) -> None:
    arms = {arm.name: arm for arm in read_arms(write_recipe(tmp_path, HINTS, TEACHERS), [])}

    def differs(name: str, other: str) -> dict[str, Any]:
        ours, theirs = effective(arms[name].recipe), effective(arms[other].recipe)
        return {key: ours.get(key) for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}

    assert differs("placebo", "base") == differs("restart", "full") == {}
    assert differs("wrong-hint", "+hint") == {"hints.shuffle": True}
    for name in ("weak-teacher", "permuted"):
        ((key, (teacher,)),) = differs(name, "+replay").items()
        assert (key, teacher["name"]) == ("replay.teachers", "weak")


def test_a_placebo_draws_otherwise_than_base_with_each_seed_and_is_judged_on_the_same_tasks(tmp_path: Path) -> None:
    two = ["--sites.count=2", "--orchestrator.train.source.0.env.taskset.num_examples=99"]
    jobs = jobs_in(tmp_path, num_seeds=2, overrides=two)
    drawn = [sampling_seed(job.recipe, site) for arm in ("base", "placebo") for job in jobs[arm] for site in "ab"]
    assert len(set(drawn)) == 8
    again = jobs_in(tmp_path, num_seeds=2, overrides=two)
    assert [job.recipe for job in again["placebo"]] == [job.recipe for job in jobs["placebo"]]
    for base, placebo in zip(jobs["base"], jobs["placebo"], strict=True):
        assert tasks_of(placebo.judged_by) == tasks_of(base.judged_by)
        assert placebo.recipe.model_copy(update={"sites": base.recipe.sites, "run": base.recipe.run}) == base.recipe


def test_what_is_left_out_is_told_before_the_first_run_in_a_dry_run_and_in_the_report(tmp_path: Path) -> None:
    jobs = [job for each in jobs_in(tmp_path, HINTS).values() for job in each]
    assert told(dry_run, jobs).startswith(f"{NO_TEACHER}\n")
    assert told(ablate, jobs, FakeRunner()).startswith(f"{NO_TEACHER}\n[1/5]")
    page = (jobs[0].folder / "report.md").read_text()
    assert f"\n- {NO_TEACHER}\n" in page


def rows_with(jobs: Mapping[str, list[Job]], held_out: Mapping[str, float]) -> None:
    """Leave the rows of finished runs, and final weights that are the arm's own, of each job of these arms."""
    runner = FakeRunner(lambda job: held_out[job.arm.name])
    for number, name in enumerate(held_out, 1):
        for job in jobs[name]:
            runner(job, lambda: False)
            model = load_policy(Path(job.recipe.model.name))
            torch.nn.init.constant_(next(model.parameters()), number)
            publish(model, job.run.site("a").broadcasts, 4)


def first_number(folder: Path) -> float:
    """What `rows_with` put into the weights of an arm."""
    return float(next(load_policy(folder).parameters()).detach().flatten()[0])


def test_a_restart_begins_with_the_final_weights_of_the_best_arm_of_its_seed_and_keeps_them(tmp_path: Path) -> None:
    model = [f"--model.name={save_random_tiny(tmp_path / 'model')}"]
    jobs = jobs_in(tmp_path, num_seeds=2, overrides=model)
    rows_with(jobs, {"base": 0.2, "+hint": 0.7, "+replay": 0.6, "full": 0.3})
    first, other = jobs["restart"]
    row, folder = start_of(first), Path(first.recipe.model.name)
    assert (row.arm, row.seed, row.held_out) == ("+hint", 0, 0.7) and first_number(folder) == 2
    assert folder.parent.parent == first.folder and other.recipe.model.name != first.recipe.model.name
    assert jobs_in(tmp_path, num_seeds=2, overrides=model)["restart"][0].recipe == first.recipe
    rows_with(jobs, {"full": 0.9})  # judged anew
    assert start_of(first).arm == "+hint" and start_of(other).arm == "full"
    assert load_file(folder / "model.safetensors").keys() == load_file(tmp_path / "model/model.safetensors").keys()


def test_a_restart_whose_seed_lacks_a_run_is_not_made_and_the_reason_is_told(tmp_path: Path) -> None:
    jobs = [job for each in jobs_in(tmp_path).values() for job in each]
    fake = FakeRunner(lambda job: SiteError("gone") if job.arm.name == "+hint" else 0.5)

    def runner(job: Job, is_stopped: Callable[[], bool]) -> Row | None:
        return run_job(job, is_stopped) if job.before else fake(job, is_stopped)

    said = told(ablate, jobs, runner)
    reason = "failed: it begins where the best run of its seed ended, and there is no row of +hint seed 0"
    assert f"restart seed 0 {reason}" in said
    page = (jobs[0].folder / "report.md").read_text()
    assert "Missing: +hint seed 0, restart seed 0." in page and f"- restart seed 0 {reason}" in page.replace("\\", "")
    assert not jobs[-1].run.root.exists() and not Path(jobs[-1].recipe.model.name).exists()


def test_the_report_says_where_a_restart_began(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, num_seeds=2)
    rows = {job: row_of(job, 0.5) for name in ("base", "+hint") for job in jobs[name]}
    rows |= {job: row_of(job, 0.6, start=0.4 + job.seed / 5, restarted_from="+hint") for job in jobs["restart"]}
    jobs["base"][0].folder.mkdir(parents=True)
    page = write_report([job for each in zip(*jobs.values(), strict=True) for job in each], rows, {}).read_text()
    lines = {line.split(" | ")[0]: line.split(" | ") for line in page.splitlines() if line.startswith("| ")}
    assert lines["| restart"][1:3] == ["2", "0.600 [0.600, 0.600]"] and lines["| restart"][3].startswith("+0.100")
    assert lines["| restart"][6].startswith("0.500 [") and lines["| base"][6].startswith("0.100 [")


def address(recipe: Recipe) -> str:
    (teacher,) = recipe.replay.teachers
    return teacher.base_url


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_a_continued_run_has_its_teacher_where_it_was_or_says_what_to_do(tmp_path: Path) -> None:
    (job,) = jobs_in(tmp_path)["weak-teacher"]

    def url() -> str:
        with teacher_served(job, lambda: True) as recipe:
            return address(recipe)

    with teacher_served(job, lambda: True) as begun:
        job.run.recipe.parent.mkdir(parents=True)
        job.run.recipe.write_text(json.dumps(begun.to_data()))
    assert {url(), url()} == {address(begun)}
    (again,) = jobs_in(tmp_path)["weak-teacher"]  # the port makes no other recipe of it
    assert again.arm.sha256 == job.arm.sha256
    with listen(port_of(address(begun))), pytest.raises(BadInput, match=f"port {port_of(address(begun))} .* in use:"):
        url()


def test_a_teacher_that_ends_instead_is_told_with_its_last_words(tmp_path: Path) -> None:
    (job,) = jobs_in(tmp_path, overrides=["--model.name=./nowhere"])["permuted"]
    reason = r"its teacher ended, see .*permuted-s0-teacher.log: .*nowhere"
    with pytest.raises(SiteError, match=reason), teacher_served(job, lambda: False):
        pass


def test_an_arm_with_no_teacher_of_ours_gets_none(tmp_path: Path) -> None:
    (job,) = jobs_in(tmp_path)["full"]
    with teacher_served(job, lambda: False) as recipe:
        assert recipe is job.recipe
    assert not job.log.parent.exists()


def test_a_restart_that_ends_below_where_it_began_has_a_line_also_above_base(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, num_seeds=2)
    rows = {job: row_of(job, 0.5 + job.seed / 100) for job in jobs["base"]}
    rows |= {job: row_of(job, 0.7, start=0.9 - job.seed / 100, restarted_from="+hint") for job in jobs["restart"]}
    jobs["base"][0].folder.mkdir(parents=True)
    page = write_report([*rows], rows, {}).read_text()
    (line,) = [line for line in page.splitlines() if "is worse than" in line]
    assert line.startswith("**restart is worse than where it began**: -0.195 [")


@pytest.fixture
def both(tmp_path: Path) -> Iterator[list[str]]:
    """The addresses of both teachers of ours, of one random model, inside runs that raise in the end."""
    jobs = jobs_in(tmp_path, overrides=[f"--model.name={save_random_tiny(tmp_path / 'model')}"])
    with pytest.raises(ZeroDivisionError), ExitStack() as stack:
        arms = [jobs[name][0] for name in ("weak-teacher", "permuted")]
        urls = [address(stack.enter_context(teacher_served(job, lambda: False))) for job in arms]
        yield urls
        raise ZeroDivisionError
    assert all(is_free(port_of(url)) for url in urls), "they outlive their runs"


@pytest.mark.slow
def test_permuted_logits_are_those_of_the_same_model_under_one_permutation(both: list[str]) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 64}
    likeliest = []
    for url in both:
        with httpx.Client(base_url=url, headers=headers(user_token()), trust_env=False, timeout=60) as http:
            bodies = [{"token_ids": prompt, "sampling_params": sampling} for prompt in PROMPTS]
            answers = [http.post("/inference/v1/generate", json=body).json() for body in bodies]
        entries = [each for answer in answers for each in answer["prompt_logprobs"][1:]]
        found = [[(one["logprob"], int(token)) for token, one in each.items()] for each in entries]
        likeliest.append([sorted(each, reverse=True)[:64] for each in found])
    image: dict[int, int] = {}
    for plain, permuted in zip(*likeliest, strict=True):
        assert [one for one, _ in permuted] == pytest.approx([one for one, _ in plain], abs=1e-4)
        for (_, token), (_, other) in zip(plain, permuted, strict=True):
            assert image.setdefault(token, other) == other
    assert len(set(image.values())) == len(image) > 64
    assert sum(token == other for token, other in image.items()) < len(image) / 10
