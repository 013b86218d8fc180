"""Arms: what each trains, and that those that can't be compared are refused in one line before anything starts."""

from pathlib import Path

import pytest

from composer_prime.ablate.plan import plan_jobs
from composer_prime.ablate.runner import check_tasks, run_job
from composer_prime.config.ablate import effective, read_arms, tasks_of
from composer_prime.errors import BadInput, ConfigError
from tests.ablate.arms import HINTS, PAIRS, TEACHERS, TRACES, write_recipe


def test_each_signal_of_a_recipe_has_an_arm_without_the_others(tmp_path):
    recipe = write_recipe(tmp_path, HINTS, TEACHERS, PAIRS, TRACES)
    arms = {arm.name: arm.recipe for arm in read_arms(recipe, [], harm=False)}
    has = {
        name: [
            recipe.hints is not None,
            bool(recipe.replay.teachers),
            recipe.replay.pairs is not None,
            recipe.replay.traces is not None,
        ]
        for name, recipe in arms.items()
    }
    assert list(has) == ["base", "+hint", "+replay", "+pairs", "+traces", "full"]
    assert [sum(signals) for signals in has.values()] == [0, 1, 1, 1, 1, 4]
    assert [has[name][place] for place, name in enumerate(["+hint", "+replay", "+pairs", "+traces"])] == [True] * 4


@pytest.mark.parametrize(("table", "names"), [(HINTS, ["base", "+hint"]), (TEACHERS, ["base", "+replay"])])
def test_a_signal_that_the_recipe_lacks_gives_no_arm(tmp_path: Path, table: str, names: list[str]):
    assert [arm.name for arm in read_arms(write_recipe(tmp_path, table), [], harm=False)] == names


def test_a_further_arm_is_the_recipe_with_its_settings(tmp_path: Path):
    recipe = write_recipe(tmp_path, HINTS)
    *_, full, hot = read_arms(recipe, ["--max_steps", "6"], ["hot trainer.optim.lr=0.5 seq_len=64"], harm=False)
    changed = {key for key, value in effective(hot.recipe).items() if effective(full.recipe)[key] != value}
    assert changed == {"trainer.optim.lr", "seq_len"}
    assert (hot.recipe.trainer.optim.lr, hot.recipe.seq_len, hot.recipe.max_steps) == (0.5, 64, 6)


@pytest.mark.parametrize(
    ("further", "words"),
    [
        (["same trainer.optim.lr=1e-6"], "arm same can't differ from base"),
        (["a seq_len=64", "b seq_len=64"], "arm b can't differ from a"),
        (["a ckpt.interval=3"], "arm a can't differ from base"),
        (["a hints=None trainer.loss.kwargs.replay_tau=0.5"], "arm a can't differ from base"),
        (["a seq_len=64", "a seq_len=65"], "arms a and a would share their folders"),
        (["a run.seed=3"], "arm a sets run.seed"),
        (["a"], "arm a needs settings as KEY=VALUE"),
        (["A seq_len=64"], r"arm name \('A'\) must be"),
        (["slow 'x=1"], r"arm \(slow 'x=1\) can't be read: No closing quotation: write --arm"),
        ([], "base is the only arm"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused_in_one_line(tmp_path: Path, further: list[str], words: str):
    with pytest.raises(BadInput, match=words) as refused:
        read_arms(write_recipe(tmp_path), [], further)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_an_arm_that_changes_what_nothing_reads_is_refused(tmp_path: Path):
    recipe = write_recipe(tmp_path, HINTS)
    with pytest.raises(BadInput, match=r"arm a can't differ from \+hint"):
        read_arms(recipe, [], ["a hints.allow_live=true"])
    assert read_arms(recipe, ["--trainer.distill.divergence=jsd"], ["a trainer.distill.jsd_alpha=0.3"])[-1].name == "a"


def test_an_arm_whose_setting_is_wrong_is_refused_with_the_recipes_own_words(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"trainer\.optim\.lr"):
        read_arms(write_recipe(tmp_path), [], ["a trainer.optim.lr=-1.0"])


def test_each_run_has_its_seed_its_name_and_a_folder_in_the_ablations(tmp_path: Path):
    arms = read_arms(write_recipe(tmp_path, HINTS), ["--run.seed", "5"], harm=False)
    jobs = plan_jobs(arms, 2, 8)
    assert [job.label for job in jobs] == ["base seed 5", "+hint seed 5", "base seed 6", "+hint seed 6"]
    assert [job.recipe.run.seed for job in jobs] == [5, 5, 6, 6]
    roots = {job.run.root for job in jobs}
    assert len(roots) == 4 and {root.parent for root in roots} == {tmp_path / "out" / "test-ablation"}


ON_TWO_SITES = "two sites.count=2 orchestrator.train.source.0.env.taskset.num_examples=128"


def test_arms_whose_sites_share_the_first_arms_tasks_are_judged_on_what_that_holds_out(tmp_path: Path):
    half = "half orchestrator.train.source.0.env.taskset.num_examples=128"
    jobs = plan_jobs(read_arms(write_recipe(tmp_path), [], [ON_TWO_SITES, half]), 2, 8)
    check_tasks(jobs)
    assert [job.recipe.sites.count for job in jobs] == [1, 2, 1] * 2
    assert [tasks_of(job.judged_by) for job in jobs] == [tasks_of(jobs[0].recipe)] * 6
    assert [job.judged_by.run for job in jobs] == [job.recipe.run for job in jobs]


def test_an_arm_is_judged_with_its_own_model_and_agent(tmp_path: Path):
    agent = "orchestrator.train.source.0.env.agent.max_turns=7"
    job = plan_jobs(read_arms(write_recipe(tmp_path), [], [f"own model.name=tiny-sort {agent}"]), 1, 8)[1]
    assert job.judged_by == job.recipe
    assert job.judged_by.orchestrator.train.source[0].env.agent.max_turns == 7


@pytest.mark.parametrize(
    "further",
    [
        "wide sites.count=2",
        ON_TWO_SITES.replace("two", "wide").replace("128", "129"),
        "wide orchestrator.train.source.0.env.taskset.seed=1",
    ],
)
def test_an_arm_that_trains_on_held_out_tasks_is_refused(tmp_path: Path, further: str):
    jobs = plan_jobs(read_arms(write_recipe(tmp_path), [], [further]), 2, 8)
    with pytest.raises(BadInput, match=r"arm wide: [1-8] of 8 held-out tasks .* none but the tasks of the first arm's"):
        check_tasks(jobs)


def test_a_taskset_that_only_scores_otherwise_has_the_same_tasks(tmp_path: Path):
    taskset = "orchestrator.train.source.0.env.taskset"
    base = [f"--{taskset}.id=sort-letters", f"--{taskset}.num_examples=16"]
    jobs = plan_jobs(
        read_arms(write_recipe(tmp_path), base, [f"wide {taskset}.num_examples=32 {taskset}.credit=letters"]), 1, 8
    )
    with pytest.raises(BadInput, match="arm wide: 8 of 8 held-out tasks"):
        check_tasks(jobs)


def test_a_later_seeds_run_looks_at_its_own_tasks_before_it_trains(tmp_path: Path):
    jobs = plan_jobs(read_arms(write_recipe(tmp_path), [], ["a orchestrator.train.source.0.env.taskset.seed=0"]), 2, 99)
    check_tasks(jobs)
    with pytest.raises(BadInput, match=r"arm a: .* of 99 held-out tasks"):
        run_job(jobs[3], lambda: False)
    assert not jobs[3].run.root.exists()
