"""What a recipe needs of a machine: memory, disk, and bytes over the link, from the model's shapes alone.

Estimates, on the safe side: how much a process takes beyond its tensors was measured with the tiny model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.errors import ModelError
from composer_prime.outer.forecast import Pace, host_bytes, join_bytes, payloads_of, turn_bytes
from composer_prime.outer.fragments import NamedShape, plan_fragments
from composer_prime.sync.terms import Terms

FP32 = 4
PROCESS_BYTES = 500 * 2**20
"""Of a process that has loaded torch or the environments, before any model."""
NUM_PROCESSES = 3
STEP_FACTOR = 4
"""Copies of a layer's output that a training step holds: forward, its gradient, what lies between."""
TRAINED_SHARE = 0.5
"""Share of a row's tokens that are trained, and so meet the vocabulary: the rest is prompts."""
SCORE_TOKENS = 1024
"""Tokens, or one longer prompt, whose logits are there at once where hints are scored: inference/decoder.py's."""
SCORE_COPIES = 2
"""Of these logits: as the model gives them, and what their sum of exponentials takes. Measured."""
CHECKPOINTS = 3
"""The two that are kept, and the one that is being written."""
BROADCASTS = 4
"""Weights on their way from the trainer to the inference server."""
LOGS_BYTES = 2**30
TRAINER_BYTES = 4 + 4
"""A parameter's bytes on the GPUs of a PRIME-RL site that train: weights and gradient in fp32."""
SERVER_BYTES = 2
"""The same on those that generate: the inference server's weights in bf16, beside which it needs its cache."""
OPTIMIZER_BYTES = 4 + 4
"""Adam's moments: on the GPUs too where a recipe turns off `optim_cpu_offload`, which PRIME-RL has on by default."""
SPARING = ("trainer.model.lora", "trainer.model.fsdp_cpu_offload")
"""PRIME-RL's settings with which a site needs less."""


@dataclass(frozen=True)
class Model:
    """A model as its shapes tell of it.

    numel          trainable parameters
    width          values that one token makes in all layers together, the vocabulary's apart
    vocabulary     tokens it knows
    cache_bytes    of one token in the inference server's cache
    """

    numel: int
    width: int
    vocabulary: int
    cache_bytes: int


@dataclass(frozen=True)
class Needs:
    """What one site of a run needs; bytes.

    gpu_bytes            on all GPUs together; 0: none is needed
    join_bytes           fetched before the first step, at most, by a site that has nothing: the newest masters
    begin_bytes          of them the upper halves, from which training begins over a slow link
    up_bytes, down_bytes in a round of all fragments
    """

    memory_bytes: int
    gpu_bytes: int
    disk_bytes: int
    join_bytes: int
    begin_bytes: int
    up_bytes: int
    down_bytes: int


def model_of(shapes: Sequence[NamedShape]) -> Model:
    """What the parameters' names and shapes tell."""
    embedded = [shape for name, shape in shapes if len(shape) == 2 and ("embed" in name or "lm_head" in name)]
    layers = [shape for name, shape in shapes if len(shape) == 2 and "embed" not in name and "lm_head" not in name]
    keys = sum(shape[0] for name, shape in shapes if len(shape) == 2 and name.endswith("k_proj.weight"))
    return Model(
        numel=sum(math.prod(shape) for _, shape in shapes),
        width=sum(shape[0] for shape in layers),
        vocabulary=max((shape[0] for shape in embedded), default=0),
        cache_bytes=2 * FP32 * (keys or sum(shape[0] for shape in layers) // 4),
    )


def needs_of(recipe: RecipeBase, terms: Terms, shapes: Sequence[NamedShape], num_sites: int) -> Needs:
    """What a site of this recipe needs, in a run of so many sites."""
    model = model_of(shapes)
    fragments = plan_fragments(list(shapes), terms.fragments)
    sizes = [fragment.numel for fragment in fragments]
    payloads = payloads_of(sizes, terms.codec, terms.merged_codec, terms.slices)
    pace = Pace(terms.inner_steps, terms.fragments, terms.sync_delay, 0.0, max(2, num_sites), terms.gather_sites)
    masters = join_bytes(payloads, pace, momentum=terms.has_momentum)
    up, down = (sum(way) for way in zip(*(turn_bytes(payload, pace) for payload in payloads), strict=True))
    return Needs(
        memory_bytes=memory_bytes(recipe, terms, model),
        gpu_bytes=gpu_bytes(recipe, model.numel),
        disk_bytes=disk_bytes(recipe, model),
        join_bytes=masters.newest_bytes,
        begin_bytes=masters.first_bytes * (2 if terms.has_momentum else 1),
        up_bytes=up,
        down_bytes=down,
    )


def gpu_bytes(recipe: RecipeBase, numel: int) -> int:
    """Memory on all GPUs of a site together, for a model of so many parameters."""
    if not isinstance(recipe, PrimeRecipe):
        return 0
    return trainer_bytes(recipe, numel) + SERVER_BYTES * numel


def trainer_bytes(recipe: PrimeRecipe, numel: int) -> int:
    """Memory on the GPUs that train, together."""
    offloads = recipe.upstream_value("trainer.model.optim_cpu_offload", True)
    return (TRAINER_BYTES + (0 if offloads else OPTIMIZER_BYTES)) * numel


def spared_by(recipe: PrimeRecipe) -> str | None:
    """The setting by which a recipe needs less GPU memory than `gpu_bytes`, by an amount that nobody has measured."""
    return next((name for name in SPARING if recipe.upstream_value(name)), None)


def gpu_bytes_beforehand(recipe: RecipeBase) -> int:
    """The same, from the recipe alone; of a model on the Hub only the configuration is downloaded.

    Raises ModelError where that can't be had, or the recipe spares memory in a way that nobody has measured.
    """
    if not isinstance(recipe, PrimeRecipe):
        return 0
    if (name := spared_by(recipe)) is not None:
        raise ModelError(f"{name} is set, and how much that spares isn't known")
    from composer_prime.sites.embedded.shapes import named_shapes

    return gpu_bytes(recipe, sum(math.prod(shape) for _, shape in named_shapes(recipe.model.name)))


def outer_bytes(terms: Terms, model: Model) -> int:
    """Memory of an embedded site's outer loop: masters, what was adopted, is captured, coding left, is on its way."""
    return terms.master_nbytes(model.numel) + 3 * FP32 * model.numel + 2 * FP32 * model.numel // terms.fragments


def memory_bytes(recipe: RecipeBase, terms: Terms, model: Model) -> int:
    """Memory of a site's processes together."""
    fixed = NUM_PROCESSES * PROCESS_BYTES
    if not isinstance(recipe, Recipe):
        largest = -(-model.numel // terms.fragments)
        return fixed + host_bytes(model.numel, largest, momentum=terms.has_momentum).closing
    fixed += outer_bytes(terms, model)
    trainer = 4 * FP32 * model.numel  # weights, gradient, two moments
    inference = 2 * FP32 * model.numel  # the weights, and new ones on their way in
    hints = hints_bytes(recipe, model)
    return fixed + trainer + inference + hints + step_bytes(recipe, model) + cache_bytes(recipe, model)


def step_bytes(recipe: Recipe, model: Model) -> int:
    """Memory of one forward and backward pass."""
    tokens = max(recipe.site.micro_batch_tokens, recipe.seq_len)
    per_token = FP32 * STEP_FACTOR * (model.width + TRAINED_SHARE * model.vocabulary)
    return int(tokens * per_token)


def cache_bytes(recipe: Recipe, model: Model) -> int:
    """Memory of the inference server's cache when it is full."""
    return recipe.inference.max_batch_size * recipe.seq_len * model.cache_bytes


def hints_bytes(recipe: Recipe, model: Model) -> int:
    """Memory that hints take: the server's second model, an average in the trainer, logits of what is scored."""
    if recipe.hints is None or recipe.hints.base_url is not None:
        return 0
    copies = int(recipe.hints.is_held) + _num_averages(recipe)
    return FP32 * copies * model.numel + FP32 * SCORE_COPIES * max(SCORE_TOKENS, recipe.seq_len) * model.vocabulary


def disk_bytes(recipe: RecipeBase, model: Model) -> int:
    """Disk of a site: the model, checkpoints with optimizer and outer state, weights on their way, journal, logs."""
    averages = _num_averages(recipe)
    checkpoint = (6 + averages) * FP32 * model.numel
    broadcasts = BROADCASTS * (1 + averages)
    return FP32 * model.numel * (1 + broadcasts + 2) + CHECKPOINTS * checkpoint + LOGS_BYTES


def _num_averages(recipe: RecipeBase) -> int:
    """How often an average stands beside a trainer's weights: once where hints are read by one."""
    return int(isinstance(recipe, Recipe) and recipe.hints is not None and recipe.hints.teacher == "ema")
