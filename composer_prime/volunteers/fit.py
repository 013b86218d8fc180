"""A recipe made to fit a machine: what is each site's own affair follows memory, cores and speed, the rest stays.

Pure: from what the machine has to what the site will do, each change with its reason. Settings that all sites share
aren't touched.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.errors import MachineUnfit
from composer_prime.sync.terms import Terms
from composer_prime.volunteers.machine import Machine
from composer_prime.volunteers.needs import Model, cache_bytes, memory_bytes, step_bytes

MEMORY_SHARE = 0.85
"""Of what is free: a machine that swaps is no use to anybody."""
LEAST_MICRO_TOKENS = 128
SMALL_NUMEL = 5_000_000
"""Below it a second thread costs more than it brings."""
MOST_THREADS = 16
STEPS_A_TURN = 2
"""With pace "seconds": inner steps that shall fit between two offers, at least."""
OPERATIONS = 8
"""For each parameter and token: two to generate, six to train."""
GIB = 2**30
AnyRecipe = TypeVar("AnyRecipe", bound=RecipeBase, covariant=True)


@dataclass(frozen=True)
class Fit(Generic[AnyRecipe]):
    """The recipe as this machine will run it.

    reasons    each change, and why
    memory_bytes   that the site will take, about
    step_s     an inner step will take, about; None: not known
    """

    recipe: AnyRecipe
    reasons: tuple[str, ...]
    memory_bytes: int
    step_s: float | None


def fit(recipe: Recipe, terms: Terms, model: Model, machine: Machine, *, keep_batch: bool = False) -> Fit[Recipe]:
    """Fit batch and threads to a machine. Raises MachineUnfit when even the smallest does not.

    keep_batch   leave the number of rollouts a step as it is: a site goes on as it began
    """
    reasons: list[str] = []
    recipe = _with_threads(recipe, model, machine, reasons)
    recipe = _with_memory(recipe, terms, model, machine, reasons)
    step_s = _step_s(recipe, model, machine)
    if step_s is not None and not keep_batch:
        recipe = _with_batch(recipe, terms, step_s, reasons)
        step_s = _step_s(recipe, model, machine)
    return Fit(recipe, tuple(reasons), memory_bytes(recipe, terms, model), step_s)


def _with_threads(recipe: Recipe, model: Model, machine: Machine, reasons: list[str]) -> Recipe:
    """Half of the cores each to the trainer and the inference server, which work at the same time."""
    threads = 1 if model.numel < SMALL_NUMEL else max(1, min(MOST_THREADS, machine.cores // 2))
    why = "the model is small" if model.numel < SMALL_NUMEL else f"{machine.cores} cores, for two that compute"
    reasons.append(f"site.threads {threads}: {why}")
    return _set_site(recipe, threads=threads)


def _with_memory(recipe: Recipe, terms: Terms, model: Model, machine: Machine, reasons: list[str]) -> Recipe:
    """Shorter forward passes and fewer sequences at once, until it fits."""
    most = recipe.inference.max_batch_size
    recipe = _set_batch(recipe, min(most, recipe.orchestrator.batch_size))
    before, limit = recipe, int(MEMORY_SHARE * machine.free_memory_bytes)
    while memory_bytes(recipe, terms, model) > limit:
        tokens, sequences = recipe.site.micro_batch_tokens, recipe.inference.max_batch_size
        can_shorten = tokens > max(LEAST_MICRO_TOKENS, recipe.seq_len)
        if can_shorten and step_bytes(recipe, model) >= cache_bytes(recipe, model):
            recipe = _set_site(recipe, micro_batch_tokens=max(LEAST_MICRO_TOKENS, recipe.seq_len, tokens // 2))
        elif sequences > 1:
            recipe = _set_batch(recipe, sequences // 2)
        elif can_shorten:
            recipe = _set_site(recipe, micro_batch_tokens=max(LEAST_MICRO_TOKENS, recipe.seq_len, tokens // 2))
        else:
            raise MachineUnfit(
                f"this machine has {machine.free_memory_bytes / GIB:.1f} GiB of memory free, of which a site may take "
                f"{limit / GIB:.1f}, and the recipe needs {memory_bytes(recipe, terms, model) / GIB:.1f} at the least "
                f"({model.numel:,} parameters): close other programs, or join from a larger machine"
            )
    free = f"{machine.free_memory_bytes / GIB:.1f} GiB of memory are free"
    if recipe.site.micro_batch_tokens < before.site.micro_batch_tokens:
        reasons.append(f"site.micro_batch_tokens {recipe.site.micro_batch_tokens}: {free}")
    if recipe.inference.max_batch_size < before.inference.max_batch_size:
        reasons.append(f"inference.max_batch_size {recipe.inference.max_batch_size}: {free}")
    elif before.inference.max_batch_size < most:
        reasons.append(f"inference.max_batch_size {before.inference.max_batch_size}: as many as a step has rollouts")
    return recipe


def _with_batch(recipe: Recipe, terms: Terms, step_s: float, reasons: list[str]) -> Recipe:
    """Fewer rollouts a step, where a whole step would outlast a turn, or so many steps the others' patience."""
    group, size = recipe.orchestrator.group_size, recipe.orchestrator.batch_size
    if terms.pace == "seconds":
        wanted_s, why = terms.seconds_per_turn / STEPS_A_TURN, f"a turn is {terms.seconds_per_turn:g} s"
    else:
        wanted_s = terms.grace_s / terms.steps_per_turn
        why = f"a turn has {terms.steps_per_turn} steps; who is behind is waited for {terms.grace_s:g} s at most"
    if step_s <= wanted_s or size == group or wanted_s == 0:  # where nobody waits, nothing is to be reached
        return recipe
    smaller = max(group, int(size * wanted_s / step_s) // group * group)
    reasons.append(
        f"orchestrator.batch_size {smaller}, not {size}: a step of {size} would take about {step_s:.1f} s, and {why}"
    )
    orchestrator = recipe.orchestrator.model_copy(update={"batch_size": smaller})
    recipe = recipe.model_copy(update={"orchestrator": orchestrator})
    return _set_batch(recipe, min(recipe.inference.max_batch_size, smaller))


def _step_s(recipe: Recipe, model: Model, machine: Machine) -> float | None:
    """Seconds of an inner step, about: prompts taken to be as long as answers."""
    if machine.torch is None or machine.torch.flops <= 0:
        return None
    tokens = recipe.orchestrator.batch_size * 2 * recipe.orchestrator.train.sampling.max_completion_tokens
    return tokens * OPERATIONS * model.numel / (machine.torch.flops * recipe.site.threads)


def _set_site(recipe: Recipe, **changes: int) -> Recipe:
    return recipe.model_copy(update={"site": recipe.site.model_copy(update=changes)})


def _set_batch(recipe: Recipe, sequences: int) -> Recipe:
    inference = recipe.inference.model_copy(update={"max_batch_size": sequences})
    return recipe.model_copy(update={"inference": inference})
