"""GPU memory that a PRIME-RL site needs at least, and which of a machine's GPUs train and which generate.

Keys are PRIME-RL's at 559b447: `[deployment]` gives the numbers of GPUs, and parallelism says in which steps they may
grow (prime_rl/configs/rl.py, trainer.py). Activations and the server's cache come on top.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

from composer_prime.config.prime_rl import Layout, PrimeRecipe
from composer_prime.config.recipe import RecipeBase
from composer_prime.errors import MachineUnfit
from composer_prime.plan.memory import FP32, GIB

SERVER_BYTES = 2
"""A parameter's on the GPUs that generate: bf16."""
SPARING = ("trainer.model.lora", "trainer.model.fsdp_cpu_offload")
"""PRIME-RL's settings with which a site needs less, by an amount that isn't known."""
DEFAULT_BATCH, GPUS_PER_NODE = 128, 8
"""PRIME-RL's."""
ROLLOUTS, TOKENS = "orchestrator.batch_size", "orchestrator.token_batch_size"
SPLITS = ("trainer.model.cp", "trainer.model.ep", "trainer.dp_replicate")
"""Each must divide the number of GPUs that train."""


def trainer_bytes(recipe: PrimeRecipe, numel: int) -> int:
    """Memory on the GPUs that train, together: weights and gradient, and Adam's moments where they aren't offloaded."""
    offloads = recipe.upstream_value("trainer.model.optim_cpu_offload", True)
    return (2 if offloads else 4) * FP32 * numel


def spared_by(recipe: PrimeRecipe) -> str | None:
    """The setting by which a recipe needs less GPU memory than is counted here."""
    return next((name for name in SPARING if recipe.upstream_value(name)), None)


def gpu_bytes(recipe: RecipeBase, numel: int) -> int:
    """Memory on all GPUs of a site together, for a model of `numel` parameters; 0 where it needs none."""
    return trainer_bytes(recipe, numel) + SERVER_BYTES * numel if isinstance(recipe, PrimeRecipe) else 0


def share_gpus(recipe: PrimeRecipe, numel: int, gpus: Sequence[int]) -> tuple[PrimeRecipe, list[str]]:
    """Share a machine's GPUs out as the recipe's are, and make the batch smaller by as much as they are fewer.

    gpus   memory of each, bytes; at least one. How fast they are isn't known: each counts as the recipe's

    Returns the recipe as it runs here, and what was changed. Raises MachineUnfit when there are too few, or their
    memory can't hold trainer and inference server apart.
    """
    if recipe.upstream.get("slurm") is not None:
        return recipe, ["GPUs: SLURM places them, as the recipe says"]
    if recipe.upstream_value("deployment.type") == "multi_node":
        raise MachineUnfit(
            "the recipe's deployment.type is multi_node, and this is one machine: ask the run's owner for a recipe "
            "with single_node"
        )
    wanted = recipe.layout
    found = max(_layouts(recipe, numel, gpus), key=lambda one: _merit(one, wanted))
    reasons = [f"GPUs: {found.train} to train, {found.infer} to generate, of {len(gpus)} here"]
    if found != wanted:
        reasons[0] += f" (the recipe's {wanted.train} and {wanted.infer} don't fit)"
        recipe = _with_layout(recipe, found)
    share = _share(found, wanted)
    if share < 1:
        recipe = _smaller(recipe, share, found, reasons)
    return recipe, reasons


def batch_size(recipe: PrimeRecipe) -> int:
    """Rollouts of a step, or its tokens where the recipe counts those."""
    return recipe.upstream_value(_batch_key(recipe)) or DEFAULT_BATCH


def _layouts(recipe: PrimeRecipe, numel: int, gpus: Sequence[int]) -> list[Layout]:
    """Every way to share the GPUs out. Raises MachineUnfit where there is none."""
    unit = math.lcm(*(value for name in SPLITS if isinstance(value := recipe.upstream_value(name, 1), int)))
    wanted, tensor = recipe.layout, recipe.upstream_value("inference.vllm.tensor_parallel_size", 1)
    least = Layout(unit, tensor if wanted.infer else 0)
    if least.total > len(gpus):
        raise MachineUnfit(
            f"this machine has {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, and the recipe needs {least.total} at "
            f"the least: {least.train} to train, {least.infer} to generate. Join from a machine with more"
        )
    memory = math.inf if spared_by(recipe) else min(gpus)
    trains = [n for n in range(unit, len(gpus) + 1, unit) if trainer_bytes(recipe, numel) <= n * memory]
    infers = range(tensor, len(gpus) + 1, tensor) if wanted.infer else (0,)
    fits_server = not wanted.infer or SERVER_BYTES * numel <= tensor * memory
    found = [Layout(train, infer) for train in trains for infer in infers if train + infer <= len(gpus)]
    if not found or not fits_server:
        raise MachineUnfit(
            f"this machine's {len(gpus)} GPUs have {memory / GIB:.1f} GiB each at the least, and a model of "
            f"{numel:,} parameters needs {trainer_bytes(recipe, numel) / GIB:.1f} on those that train and "
            f"{SERVER_BYTES * numel / tensor / GIB:.1f} on each that generates: join from a larger machine"
        )
    return found


def _share(found: Layout, wanted: Layout) -> float:
    """Of the recipe's GPUs, in the role that is worse off; 1 where there are as many or more."""
    return min(1.0, found.train / wanted.train, found.infer / wanted.infer if wanted.infer else 1.0)


def _merit(found: Layout, wanted: Layout) -> tuple[float, int, int]:
    """By which the best layout is found: no slower than the recipe's, then as few GPUs as will do; else as many."""
    share = _share(found, wanted)
    return share, found.total if share < 1 else -found.total, found.infer


def _smaller(recipe: PrimeRecipe, share: float, layout: Layout, reasons: list[str]) -> PrimeRecipe:
    """The recipe with a batch that so many GPUs do in about the time that the recipe's take for its own."""
    before, key = batch_size(recipe), _batch_key(recipe)
    unit, least = 1, recipe.upstream_value("seq_len", 1)  # of tokens: a sequence
    if key == ROLLOUTS:
        unit = recipe.upstream_value("orchestrator.group_size", 1)
        least = math.ceil(layout.train / unit) * unit  # whole groups, and a rollout for each GPU that trains
    size = min(before, max(least, int(before * share) // unit * unit))
    if size == before:
        return recipe
    reasons.append(f"{key} {size}, not {before}: {share:.0%} of the recipe's GPUs, so that a step takes about as long")
    return _with(recipe, key, size)


def _batch_key(recipe: PrimeRecipe) -> str:
    return ROLLOUTS if recipe.upstream_value(TOKENS) is None else TOKENS


def _with_layout(recipe: PrimeRecipe, layout: Layout) -> PrimeRecipe:
    recipe = _with(recipe, "deployment.num_train_gpus", layout.train)
    if layout.infer:
        recipe = _with(recipe, "deployment.num_infer_gpus", layout.infer)
    if layout.total > recipe.upstream_value("deployment.gpus_per_node", GPUS_PER_NODE):
        recipe = _with(recipe, "deployment.gpus_per_node", layout.total)
    return recipe


def _with(recipe: PrimeRecipe, name: str, value: Any) -> PrimeRecipe:
    """The recipe with one of PRIME-RL's keys, two deep, set."""
    table, key = name.split(".")
    changed = copy.deepcopy(recipe.upstream.get(table) or {})
    changed[key] = value
    return recipe.model_copy(update={table: changed})
