"""Memory that a site holds, counted by parameters, and what the machine, container or job has of it.

Activations, the server's cache, the buffers of a round under way, and what Python and torch take come on top, unknown
beforehand. By it a PRIME-RL recipe's roles are shared out over another machine's GPUs; keys are PRIME-RL's at 559b447
(prime_rl/configs/rl.py, trainer.py).
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from composer_prime.config.prime_rl import Layout, PrimeRecipe
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.errors import MachineUnfit
from composer_prime.sync.terms import Terms

MEMINFO, CGROUPS, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
GIB = 2**30
FP32 = 4
TRAINER_BYTES = {"adamw": 4 * FP32, "muon": 3 * FP32}
"""A parameter's in an embedded trainer: weights, gradient, and Adam's two moments, or of a matrix Muon's one."""
SERVER_BYTES = 2
"""A parameter's on the GPUs that generate: bf16."""
SPARING = ("trainer.model.lora", "trainer.model.fsdp_cpu_offload")
"""PRIME-RL's settings with which a site needs less, by an amount that isn't known."""
DEFAULT_BATCH, GPUS_PER_NODE = 128, 8
"""PRIME-RL's."""
ROLLOUTS, TOKENS = "orchestrator.batch_size", "orchestrator.token_batch_size"
SPLITS = ("trainer.model.cp", "trainer.model.ep", "trainer.dp_replicate")
"""Each must divide the number of GPUs that train."""


def outer_bytes(terms: Terms, numel: int) -> int:
    """What an outer loop holds between two rounds: masters, and what coding left for the next offer."""
    from composer_prime.outer.codecs import get_codec

    residual = FP32 * numel if terms.error_feedback and get_codec(terms.codec).lossy else 0
    return terms.master_nbytes(numel) + residual


def host_bytes(recipe: RecipeBase, terms: Terms, numel: int) -> int:
    """What a site's processes hold of `numel` parameters in the machine's memory. PRIME-RL's own is not known."""
    if not isinstance(recipe, Recipe):
        return outer_bytes(terms, numel)
    models = 1  # the inference server's
    if recipe.hints is not None and recipe.hints.base_url is None:
        models += int(recipe.hints.is_held) + int(recipe.hints.teacher == "ema")
    return outer_bytes(terms, numel) + (TRAINER_BYTES[recipe.trainer.optim.type] + models * FP32) * numel


def check_memory(terms: Terms, numel: int) -> None:
    """Raise MachineUnfit unless this machine has free what the outer loop holds on a PRIME-RL trainer's first rank."""
    needed, (_, free) = outer_bytes(terms, numel), memory()
    if needed > free:
        raise MachineUnfit(
            f"the outer loop holds {needed / GIB:.2f} GiB of memory on the machine of this trainer's first rank "
            f"({numel:,} parameters), and {free / GIB:.2f} GiB are free there: take a machine or a job with more"
        )


def memory() -> tuple[int, int]:
    """(all, free) bytes of memory; the limits of this process's control groups count, of their version 2."""
    total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass  # not Linux: what is free isn't told, and all there is counts
    try:
        inner = CGROUPS / OWN_CGROUP.read_text().partition("0::/")[2].partition("\n")[0]
    except OSError:
        inner = CGROUPS
    for group in (each for each in (inner, *inner.parents) if each.is_relative_to(CGROUPS)):
        try:
            limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(stat["inactive_file"])  # can be given back at once, as Kubernetes reckons
        except (OSError, KeyError, ValueError):
            continue  # no such file, or "max"
        total, free = min(total, limit), min(free, max(0, limit - used + cached))
    return total, free


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

    `gpus` is the memory of each, bytes; at least one. How fast they are isn't known: each counts as the recipe's.
    Returns the recipe as it runs here, and what was changed. Raises MachineUnfit when they can't hold it.
    """
    if recipe.upstream.get("slurm") is not None:
        return recipe, ["GPUs: SLURM places them, as the recipe says"]
    if recipe.upstream_value("deployment.type") == "multi_node":
        raise MachineUnfit(
            "the recipe's deployment.type is multi_node, and this is one machine: ask for a recipe with single_node"
        )
    wanted, (found, share), before = recipe.layout, _layout(recipe, numel, gpus), batch_size(recipe)
    reasons = [f"GPUs: {found.train} to train, {found.infer} to generate, of {len(gpus)} here"]
    if found != wanted:
        reasons[0] += f" (the recipe's {wanted.train} and {wanted.infer} don't fit)"
        per_node = max(found.total, recipe.upstream_value("deployment.gpus_per_node", GPUS_PER_NODE))
        recipe = _with(recipe, "deployment", num_train_gpus=found.train, gpus_per_node=per_node)
        recipe = _with(recipe, "deployment", num_infer_gpus=found.infer) if found.infer else recipe
    key, unit, least = TOKENS, 1, recipe.upstream_value("seq_len", 1)  # a sequence
    if recipe.upstream_value(TOKENS) is None:
        key, unit = ROLLOUTS, recipe.upstream_value("orchestrator.group_size", 1)
        least = math.ceil(found.train / unit) * unit  # whole groups, and a rollout for each GPU that trains
    size = min(before, max(least, int(before * share) // unit * unit))
    if share < 1 and size < before:
        reasons.append(f"{key} {size}, not {before}: {share:.0%} of the recipe's GPUs, so a step takes about as long")
        recipe = _with(recipe, "orchestrator", **{key.partition(".")[2]: size})
    return recipe, reasons


def batch_size(recipe: PrimeRecipe) -> int:
    """Rollouts of a step, or its tokens where the recipe counts those."""
    return next(filter(None, map(recipe.upstream_value, (TOKENS, ROLLOUTS))), DEFAULT_BATCH)


def _layout(recipe: PrimeRecipe, numel: int, gpus: Sequence[int]) -> tuple[Layout, float]:
    """The layout that is no slower with the fewest GPUs, else the one with the most. Beside it stands its share of the
    recipe's GPUs in the role that is worse off, 1 at most. Raises MachineUnfit."""
    unit = math.lcm(*(value for name in SPLITS if isinstance(value := recipe.upstream_value(name, 1), int)))
    wanted, tensor = recipe.layout, recipe.upstream_value("inference.vllm.tensor_parallel_size", 1)
    memory = math.inf if spared_by(recipe) else min(gpus)
    least = max(unit, math.ceil(trainer_bytes(recipe, numel) / memory / unit) * unit)
    infers = range(tensor, len(gpus) + 1, tensor) if wanted.infer else (0,)
    found = [Layout(n, m) for n in range(least, len(gpus) + 1, unit) for m in infers if n + m <= len(gpus)]
    server_bytes = SERVER_BYTES * numel / tensor if wanted.infer else 0
    if not found or server_bytes > memory:
        raise MachineUnfit(
            f"this machine has {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} with {min(gpus) / GIB:.1f} GiB each, and "
            f"{numel:,} parameters need {least} to train and {tensor if wanted.infer else 0} to generate, those with "
            f"{server_bytes / GIB:.1f} GiB each: join from a larger machine"
        )

    def merit(one: Layout) -> tuple[float, int, int]:
        share = min(1.0, one.train / wanted.train, one.infer / wanted.infer if wanted.infer else 1.0)
        return share, one.total if share < 1 else -one.total, one.infer

    return max(found, key=merit), max(map(merit, found))[0]


def _with(recipe: PrimeRecipe, table: str, **values: int) -> PrimeRecipe:
    """The recipe with keys of one of PRIME-RL's tables set."""
    return recipe.model_copy(update={table: {**(recipe.upstream.get(table) or {}), **values}})
