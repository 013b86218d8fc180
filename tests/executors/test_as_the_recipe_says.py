"""What a launch plans follows from the recipe: its sites, their GPUs; what can't be known costs nothing unasked."""

from typing import Any

import pytest

from composer_prime.config import PrimeRecipe, RecipeBase, load_any
from composer_prime.errors import BadInput, ModelError, Problems
from composer_prime.launch.budget import Limits
from composer_prime.launch.plan import LaunchPlan, plan_launch
from composer_prime.launch.preflight import described, memory_lines
from tests.architecture import REPOSITORY
from tests.executors.launches import small_plan, small_recipe
from tests.executors.test_model_access import serving_hub

RECIPES = {
    "multi_site/reverse_text_2": ("a", "b"),
    "multi_site/math_4b_4": ("a", "b", "c", "d"),
    "cluster/reverse_text": ("a", "b"),
    "cluster/math_4b": ("a",),
}
"""Those whose sites are one machine each, which a launch can start."""


def read(name: str, *overrides: str) -> PrimeRecipe:
    recipe = load_any(REPOSITORY / f"recipes/{name}.toml", ["--outer.store", "s3://b/r", *overrides])
    assert isinstance(recipe, PrimeRecipe)
    return recipe


def planned(recipe: RecipeBase, on: str = "modal") -> LaunchPlan:
    return plan_launch(recipe, on, environment={})


def unknown(recipe: RecipeBase) -> int:
    raise ModelError("the hub doesn't answer")


@pytest.mark.parametrize("name", RECIPES)
def test_the_sites_are_those_that_the_recipe_names_each_with_the_gpus_that_it_uses(name: str) -> None:
    recipe = read(name)
    plan = planned(recipe)
    assert plan.sites == RECIPES[name]
    machine = plan.resources
    assert machine.gpu is not None and machine.gpu_count == recipe.layout.total > 1
    assert machine.cpus and machine.memory_gib


@pytest.mark.parametrize("name", ["multi_site/swe_30b_a3b_2", "cluster/swe_30b_a3b_slurm"])
def test_a_site_of_several_machines_is_no_job(name: str) -> None:
    with pytest.raises(BadInput, match=r"spread a site over several machines, and a job on modal is one"):
        planned(read(name))


def test_joiners_settings_make_no_site_where_the_recipe_counts_them() -> None:
    overrides = {name: {"sampling_seed": 1} for name in ("a", "b")}
    assert planned(small_recipe(sites={"count": 3, "overrides": overrides})).sites == ("a", "b", "c")
    assert planned(small_recipe(sites={"overrides": {"left": {}, "right": {}}})).sites == ("left", "right")


def test_fewer_gpus_than_a_site_uses_are_refused() -> None:
    said = r"launch.gpu_count \(1\) must be at least 2, the GPUs that \[deployment\] asks for: raise it, or drop it"
    with pytest.raises(BadInput, match=said):
        planned(read("multi_site/reverse_text_2", "--launch.gpu_count", "1"))


@pytest.mark.parametrize("on", ["modal", "hf-jobs", "sky"])
def test_a_site_that_needs_a_gpu_is_not_planned_without_one(on: str) -> None:
    for recipe, count in (
        (read("multi_site/reverse_text_2", "--launch.gpu", "None"), 2),
        (small_recipe(site={"device": "cuda"}), 1),
    ):
        with pytest.raises(BadInput, match=f"needs {count} GPUs, and launch.gpu is not set: name one by --gpu"):
            list(memory_lines(planned(recipe, on), unknown))
        assert planned(recipe, "ssh:gpu1,ssh:gpu2").resources.gpu is None, "a machine of one's own has what it has"


def test_a_quorum_that_the_sites_can_not_reach_is_said() -> None:
    plan, problems = planned(small_recipe(outer={"store": "s3://b/r", "quorum": 3}), "local"), Problems()
    said = "outer.quorum (3) is more than the 2 sites that start: no round closes until others join"
    assert said in list(described(plan, Limits(), problems, dry_run=True))
    assert not any("quorum" in line for line in described(small_plan(), Limits(), problems, dry_run=True))


@pytest.mark.parametrize("on", ["modal", "hf-jobs", "ssh:gpu1"])
def test_what_can_not_be_checked_is_refused_unless_that_is_said(cli, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shapes(model: str) -> Any:
        raise ModelError("the hub doesn't answer")

    monkeypatch.setattr("composer_prime.launch.preflight.named_shapes", shapes)
    with serving_hub() as hub:
        hub.broken = True
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        recipe, gpu = REPOSITORY / "recipes/multi_site/reverse_text_2.toml", "h200" if on == "hf-jobs" else "L4"
        command = ("launch", recipe, "--on", on, "--sites", "a", "--image", "any", "--dry-run", "--gpu", gpu)
        plain, unchecked = cli(*command), cli(*command, "--unchecked")
    assert unchecked.code == 0 and "GPU memory: not checked (the hub doesn't answer)" in unchecked.err + unchecked.out
    if on == "ssh:gpu1":
        assert plain == unchecked, "nobody bills it"
        return
    access, memory = plain.err.removeprefix("composer-prime: ").splitlines()
    assert plain.code == 2 and "site a on" not in plain.out
    assert access.startswith("access to") and memory.startswith("GPU memory")
    assert access.endswith("mend that, or go on with --unchecked") and memory.endswith("--unchecked")
