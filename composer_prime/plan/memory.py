"""Memory that a site holds, counted by parameters, and what the machine, container or job has of it.

Activations, the server's cache, the buffers of a round under way, and what Python and torch take come on top; they are
unknown beforehand. By it a PRIME-RL recipe's roles are shared out over the GPUs of another machine. Keys are PRIME-RL's
at 559b447: `[deployment]` gives the numbers of GPUs, and parallelism says in which steps they may grow
(prime_rl/configs/rl.py, trainer.py).
"""

import copy
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    """(all, free) bytes of memory; the limits of this process's control groups count."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass  # not Linux: what is free isn't told, and all there is counts
    for path in _limits():
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):
            continue  # no such file, or "max"
        total, free = min(total, limit), min(free, max(0, limit - _held(path.parent)))
    return total, free


def _held(group: Path) -> int:
    """Bytes that a control group uses and can't give back at once, as Kubernetes reckons them."""
    for used, cached in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        try:
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return int((group / used).read_text()) - int(counts[cached])
        except (OSError, KeyError, ValueError):
            continue  # the other version's names
    return 0


def _limits() -> Iterator[Path]:
    """The files with the limits of our control groups, of both versions, from the innermost outwards."""
    try:
        groups = [line.split(":", 2) for line in OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, group in groups:
        root, name = CGROUPS, "memory.max"
        if controllers:
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        if controllers in ("", "memory"):
            inner = root / group.lstrip("/")
            yield from (place / name for place in (inner, *inner.parents) if place.is_relative_to(root))


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
