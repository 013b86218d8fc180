"""A PRIME-RL recipe made to fit a machine: which of its GPUs train and which generate, and a batch that follows them.

Pure. The keys are PRIME-RL's at 559b447: `[deployment]` gives the numbers of GPUs, and parallelism says in which steps
they may grow (prime_rl/configs/rl.py, trainer.py). How fast a GPU is isn't known: each counts as much as the recipe's.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

from composer_prime.config.prime_rl import Layout, PrimeRecipe
from composer_prime.errors import MachineUnfit
from composer_prime.sync.terms import Terms
from composer_prime.volunteers.fit import GIB, Fit
from composer_prime.volunteers.machine import Gpu
from composer_prime.volunteers.needs import SERVER_BYTES, Model, memory_bytes, spared_by, trainer_bytes

DEFAULT_BATCH = 128
"""PRIME-RL's, where a recipe sets neither `batch_size` nor `token_batch_size`."""
GPUS_PER_NODE = 8
"""PRIME-RL's default: more of them must be allowed."""
ROLLOUTS, TOKENS = "orchestrator.batch_size", "orchestrator.token_batch_size"
SPLITS = ("trainer.model.cp", "trainer.model.ep", "trainer.dp_replicate")
"""Each must divide the number of GPUs that train."""


def fit_prime_rl(
    recipe: PrimeRecipe, terms: Terms, model: Model, gpus: Sequence[Gpu], *, keep_batch: bool = False
) -> Fit[PrimeRecipe]:
    """Share a machine's GPUs out as the recipe's are, and make the batch smaller where they are fewer.

    gpus         at least one
    keep_batch   leave the batch as it is: a site goes on as it began

    Raises MachineUnfit when there are too few, or their memory can't hold trainer and inference server apart.
    """
    wanted = recipe.layout
    if recipe.upstream.get("slurm") is not None:
        return Fit(recipe, ("GPUs: SLURM places them, as the recipe says",), memory_bytes(recipe, terms, model), None)
    if recipe.upstream_value("deployment.type") == "multi_node":
        raise MachineUnfit(
            "the recipe's deployment.type is multi_node, and this is one machine: ask the run's owner for a recipe "
            "with single_node"
        )
    found = max(_layouts(recipe, model, gpus), key=lambda one: _merit(one, wanted))
    reasons = [f"GPUs: {found.train} to train, {found.infer} to generate, of {len(gpus)} here"]
    if found != wanted:
        reasons[0] += f" (the recipe's {wanted.train} and {wanted.infer} don't fit)"
        recipe = _with_layout(recipe, found)
    share = _share(found, wanted)
    if share < 1 and not keep_batch:
        recipe = _smaller(recipe, share, found, reasons)
    return Fit(recipe, tuple(reasons), memory_bytes(recipe, terms, model), None)


def batch_size(recipe: PrimeRecipe) -> int:
    """Rollouts of a step, or its tokens where the recipe counts those."""
    return recipe.upstream_value(_batch_key(recipe)) or DEFAULT_BATCH


def with_batch_size(recipe: PrimeRecipe, size: int) -> PrimeRecipe:
    """The recipe with another batch, counted as it counts."""
    return _with(recipe, _batch_key(recipe), size)


def _layouts(recipe: PrimeRecipe, model: Model, gpus: Sequence[Gpu]) -> list[Layout]:
    """Every way to share the GPUs out. Raises MachineUnfit where there is none."""
    unit = math.lcm(*(value for name in SPLITS if isinstance(value := recipe.upstream_value(name, 1), int)))
    wanted, tensor = recipe.layout, recipe.upstream_value("inference.vllm.tensor_parallel_size", 1)
    least = Layout(unit, tensor if wanted.infer else 0)
    if least.total > len(gpus):
        raise MachineUnfit(
            f"this machine has {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, and the recipe needs {least.total} at "
            f"the least: {least.train} to train, {least.infer} to generate. Join from a machine with more"
        )
    memory = math.inf if spared_by(recipe) else min(gpu.memory_bytes for gpu in gpus)
    trains = [n for n in range(unit, len(gpus) + 1, unit) if trainer_bytes(recipe, model.numel) <= n * memory]
    infers = range(tensor, len(gpus) + 1, tensor) if wanted.infer else (0,)
    fits_server = not wanted.infer or SERVER_BYTES * model.numel <= tensor * memory
    found = [Layout(train, infer) for train in trains for infer in infers if train + infer <= len(gpus)]
    if not found or not fits_server:
        raise MachineUnfit(
            f"this machine's {len(gpus)} GPUs have {memory / GIB:.1f} GiB each at the least, and a model of "
            f"{model.numel:,} parameters needs {trainer_bytes(recipe, model.numel) / GIB:.1f} on those that train and "
            f"{SERVER_BYTES * model.numel / tensor / GIB:.1f} on each that generates: join from a larger machine"
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
    return with_batch_size(recipe, size)


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
