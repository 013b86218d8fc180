"""What becomes of a PRIME-RL recipe on another machine: who trains, who generates, and how much a step takes."""

from dataclasses import dataclass
from typing import Any

import pytest

from composer_prime.config.prime_rl import Layout, PrimeRecipe
from composer_prime.errors import MachineUnfit
from composer_prime.plan.memory import batch_size, share_gpus

GIB = 2**30
NUMEL = 4_000_000_000
"""Four billion parameters: 32 GB to train, 8 to generate."""
EIGHT = {"num_train_gpus": 4, "num_infer_gpus": 4}


def prime_recipe(**tables: Any) -> PrimeRecipe:
    data: dict[str, Any] = {
        "run": {"name": "r"},
        "max_steps": 40,
        "seq_len": 8192,
        "model": {"name": "org/model"},
        "site": {"backend": "prime-rl"},
        "outer": {"inner_steps": 4},
        "inference": {},
        "deployment": EIGHT,
        "orchestrator": {"batch_size": 256, "group_size": 16},
    }
    return PrimeRecipe.model_validate(data | tables)


@dataclass(frozen=True)
class Fitted:
    recipe: PrimeRecipe
    reasons: list[str]


def fitted(recipe: PrimeRecipe, gpus: int, gib: int = 80) -> Fitted:
    return Fitted(*share_gpus(recipe, NUMEL, [gib * GIB] * gpus))


@pytest.mark.parametrize(
    ("gpus", "layout", "batch"),
    [(8, (4, 4), 256), (16, (4, 4), 256), (6, (3, 3), 192), (5, (2, 3), 128), (4, (2, 2), 128), (2, (1, 1), 64)],
)
def test_gpus_are_shared_out_as_the_recipe_shares_its_own_and_the_batch_follows(
    gpus: int, layout: tuple[int, int], batch: int
) -> None:
    found = fitted(prime_recipe(), gpus)
    assert found.recipe.layout == Layout(*layout) and batch_size(found.recipe) == batch
    assert found.reasons[0].startswith(f"GPUs: {layout[0]} to train, {layout[1]} to generate, of {gpus} here")
    assert (len(found.reasons) == 2) == (batch < 256)


def test_a_machine_like_the_recipes_changes_nothing() -> None:
    recipe = prime_recipe()
    assert fitted(recipe, 8).recipe == recipe and len(fitted(recipe, 8).reasons) == 1


def test_a_batch_that_is_no_multiple_of_its_groups_stays_where_all_gpus_are() -> None:
    recipe = prime_recipe(orchestrator={"batch_size": 100, "group_size": 8})
    assert fitted(recipe, 8).recipe == recipe


def test_the_recipe_that_was_given_stays_as_it_was() -> None:
    recipe = prime_recipe()
    before = recipe.to_data()
    assert fitted(recipe, 2).recipe.to_data() != before == recipe.to_data()


def test_smaller_cards_are_met_with_more_of_them() -> None:
    recipe = prime_recipe(deployment={"num_train_gpus": 1, "num_infer_gpus": 1})
    found = fitted(recipe, 8, gib=16)
    assert found.recipe.layout == Layout(2, 1) and batch_size(found.recipe) == 256
    assert "the recipe's 1 and 1 don't fit" in found.reasons[0]


def test_parallelism_says_in_which_steps_numbers_of_gpus_may_grow() -> None:
    tensor = prime_recipe(inference={"vllm": {"tensor_parallel_size": 2}})
    assert fitted(tensor, 5).recipe.layout == Layout(3, 2)
    context = prime_recipe(trainer={"model": {"cp": 2}}, inference={"vllm": {"tensor_parallel_size": 2}})
    assert fitted(context, 7).recipe.layout == Layout(2, 4), "who generates is the slower"
    with pytest.raises(MachineUnfit, match=r"has 3 GPUs .* need 2 to train and 2 to generate"):
        fitted(context, 3)


def test_one_gpu_is_too_few_for_trainer_and_server_and_enough_for_a_trainer() -> None:
    with pytest.raises(MachineUnfit, match=r"has 1 GPU with .* need 1 to train and 1 to generate"):
        fitted(prime_recipe(), 1)
    alone = prime_recipe()
    assert alone.model_extra is not None
    del alone.model_extra["inference"]  # its server runs elsewhere
    found = fitted(alone, 1)
    assert found.recipe.layout == Layout(1, 0) and batch_size(found.recipe) == 64


def test_memory_is_asked_of_trainer_and_server_apart() -> None:
    offloading = prime_recipe(trainer={"model": {"optim_cpu_offload": False}})
    with pytest.raises(MachineUnfit, match=r"need 2 to train and 1 to generate, those with 7\.5 GiB each"):
        fitted(offloading, 2, gib=48)
    assert fitted(offloading, 3, gib=48).recipe.layout == Layout(2, 1)
    with pytest.raises(MachineUnfit, match="join from a larger machine"):
        fitted(prime_recipe(), 8, gib=7)
    sparing = prime_recipe(trainer={"model": {"lora": {"rank": 8}}})
    assert fitted(sparing, 2, gib=7).recipe.layout == Layout(1, 1), "how much it spares isn't known"


def test_a_batch_is_whole_groups_and_a_sample_for_each_that_trains_at_least() -> None:
    groups = prime_recipe(orchestrator={"batch_size": 96, "group_size": 32})
    assert batch_size(fitted(groups, 4).recipe) == 32
    single = prime_recipe(orchestrator={"batch_size": 4}, deployment={"num_train_gpus": 4, "num_infer_gpus": 1})
    assert batch_size(fitted(single, 4).recipe) == 3
    assert batch_size(fitted(prime_recipe(orchestrator={}), 4).recipe) == 64, "of PRIME-RL's own 128"


def test_a_batch_counted_in_tokens_is_made_smaller_as_such() -> None:
    tokens = fitted(prime_recipe(orchestrator={"token_batch_size": 100_000, "group_size": 16}), 4)
    assert tokens.recipe.upstream_value("orchestrator.token_batch_size") == 50_000
    assert tokens.recipe.upstream_value("orchestrator.batch_size") is None
    least = fitted(prime_recipe(orchestrator={"token_batch_size": 16_384}), 2)
    assert least.recipe.upstream_value("orchestrator.token_batch_size") == 8192, "a sequence at the least"


def test_more_gpus_than_a_node_is_said_to_have_are_allowed_where_they_are_needed() -> None:
    found = fitted(prime_recipe(inference={"vllm": {"tensor_parallel_size": 2}}), 16, gib=4)
    assert found.recipe.layout == Layout(8, 4) and batch_size(found.recipe) == 256
    assert found.recipe.upstream_value("deployment.gpus_per_node") == 12


def test_several_nodes_are_no_volunteers_machine_and_slurm_places_its_own() -> None:
    nodes = {"type": "multi_node", "num_train_nodes": 2}
    with pytest.raises(MachineUnfit, match=r"deployment\.type is multi_node, and this is one machine"):
        fitted(prime_recipe(deployment=nodes), 8)
    recipe = prime_recipe(deployment=nodes, slurm={"job_name": "r"})
    assert fitted(recipe, 1).recipe == recipe
