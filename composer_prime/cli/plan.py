"""`composer-prime plan`: what a recipe means, and what its outer loop moves, before anything is started."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.cli.options import RecipeArgument, read_recipe
from composer_prime.redaction import Redactor, secret_values
from composer_prime.visible import size

if TYPE_CHECKING:
    from composer_prime.config import RecipeBase
    from composer_prime.config.outer import OuterConfig
    from composer_prime.outer.fragments import Fragment
    from composer_prime.sync.terms import Terms


SMALL, LEAST_LR = 100_000_000, 1e-5
"""Below so many parameters a learning rate below this is warned of."""


def plan(
    context: typer.Context,
    recipe: RecipeArgument,
    link_mbit: Annotated[
        float | None, typer.Option(min=0.001, help="Mbit/s of a site's link, each way: how long a round takes over it.")
    ] = None,
    step_s: Annotated[
        float | None, typer.Option(min=0.0001, help="Seconds of an inner step, as your trainer takes. None: unknown.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="First look, as `run` does, for all that is wrong.")] = False,
) -> None:
    """Print the resolved recipe, the fragments, and the bytes a round moves; with a link, how long that takes."""
    resolved = read_recipe(recipe, context.args)
    if check:
        from composer_prime.sites.preflight import check as preflight

        print(preflight(resolved, resolved.site_names)[1])
    redactor = Redactor(secret_values(os.environ))
    print(redactor.text("\n".join(plan_lines(resolved, link_mbit, step_s))))


def plan_lines(recipe: "RecipeBase", link_mbit: float | None = None, step_s: float | None = None) -> Iterator[str]:
    """The plan, line by line. Builds the model without weights; raises ModelError or ConfigError."""
    from composer_prime.config.toml import to_toml
    from composer_prime.outer.fragments import plan_fragments
    from composer_prime.sites.embedded.model import named_shapes
    from composer_prime.sites.listening import listening_lines

    yield to_toml(recipe.to_data())
    yield from listening_lines(recipe)
    shapes = named_shapes(recipe.model.name)
    yield from _unlikely_lines(recipe, sum(math.prod(shape) for _, shape in shapes))
    if recipe.outer is None:
        (whole,) = plan_fragments(shapes, 1)
        yield f"no outer loop: one site trains {whole.numel:,} parameters alone"
        return
    fragments = plan_fragments(shapes, recipe.outer.fragments)
    yield from _fragment_lines(fragments)
    yield ""
    yield from _traffic_lines(recipe, recipe.outer, [fragment.numel for fragment in fragments], link_mbit, step_s)


def _unlikely_lines(recipe: "RecipeBase", numel: int) -> Iterator[str]:
    """What PRIME-RL's default learning rate, made for billions of parameters, can't do for a small model."""
    from composer_prime.config import PrimeRecipe, Recipe

    lr = recipe.trainer.optim.lr if isinstance(recipe, Recipe) else LEAST_LR
    if isinstance(recipe, PrimeRecipe):
        lr = float(recipe.upstream_value("trainer.optim.lr", 1e-6))
    if numel < SMALL and lr < LEAST_LR:
        yield (
            f"warning: trainer.optim.lr ({lr:g}) hardly moves a model of {numel:,} parameters: with fewer than "
            f"{SMALL:,} set {LEAST_LR:g} to 1e-3 (4e-4 for the tiny model)"
        )


def _fragment_lines(fragments: "Sequence[Fragment]") -> Iterator[str]:
    yield f"{'fragment':>8}  {'parameters':>12}  {'fp32 bytes':>12}  tensors"
    for fragment in fragments:
        names = _abbreviated(fragment.names)
        yield f"{fragment.index:>8}  {fragment.numel:>12,}  {size(fragment.nbytes):>12}  {names}"
    total = sum(fragment.numel for fragment in fragments)
    yield f"{'all':>8}  {total:>12,}  {size(sum(f.nbytes for f in fragments)):>12}"


def _traffic_lines(
    recipe: "RecipeBase", outer: "OuterConfig", numels: Sequence[int], link_mbit: float | None, step_s: float | None
) -> Iterator[str]:
    """What one site sends and fetches in a round of all fragments, for each codec; the recipe's is marked."""
    from composer_prime.config import store_uri
    from composer_prime.outer.codecs import CODECS
    from composer_prime.plan.prices import egress_line
    from composer_prime.plan.traffic import seconds, traffic
    from composer_prime.sync.terms import terms_of

    # One site alone fetches nothing, so two at the least.
    terms, sites = terms_of(recipe), max(recipe.sites.count, len(recipe.sites.overrides), 2)
    yield (
        f"a round of all {len(numels)} fragments takes {outer.inner_steps} inner steps, one fragment every "
        f"{outer.steps_per_turn}; "
        f"{recipe.rounds} rounds in {recipe.max_steps} steps; per round and site, {sites} sites:"
    )
    timed = "" if link_mbit is None else f"  {'up s':>9}  {'down s':>9}  {'round s':>9}"
    yield f"{'codec':>8}  {'up':>12}  {'down':>12}{timed}"
    for name in CODECS:
        moved = traffic(terms, numels, sites, name)
        mark = "  <- outer.codec" if name == outer.codec else ""
        if link_mbit is not None:
            up_s, down_s = seconds(moved.up_bytes, link_mbit), seconds(moved.down_bytes, link_mbit)
            least = "unknown" if step_s is None else f"{max(outer.inner_steps * step_s, up_s, down_s):.3f}"
            timed = f"  {up_s:>9.3f}  {down_s:>9.3f}  {least:>9}"
        yield f"{name:>8}  {size(moved.up_bytes):>12}  {size(moved.down_bytes):>12}{timed}{mark}"
    if link_mbit is not None:
        training = "--step-s isn't given" if step_s is None else f"inner steps of {step_s:g} s"
        yield f"over {link_mbit:g} Mbit/s each way, {training}: bytes by bandwidth; a round takes as long at least"
    yield f"a site that joins fetches {size(traffic(terms, numels, sites).join_bytes)} of masters at most"
    yield from _memory_lines(recipe, terms, sum(numels))
    uri = store_uri(recipe)
    if uri is not None and (line := egress_line(terms, numels, sites, uri)) is not None:
        yield line


def _memory_lines(recipe: "RecipeBase", terms: "Terms", numel: int) -> Iterator[str]:
    """What a site holds at least; nothing where less than the whole model is trained."""
    from composer_prime.config import PrimeRecipe
    from composer_prime.plan.memory import gpu_bytes, host_bytes, spared_by

    if not isinstance(recipe, PrimeRecipe):
        yield f"memory of a site: {size(host_bytes(recipe, terms, numel))}; forward passes on top, unknown"
    elif (name := spared_by(recipe)) is not None:
        yield f"memory of a site: unknown, since {name} is set"
    else:
        yield (
            f"memory of a site: {size(gpu_bytes(recipe, numel))} of all GPUs, activations and cache on top, unknown; "
            f"{size(host_bytes(recipe, terms, numel))} of the host beside PRIME-RL's own, a round's buffers on top"
        )


def _abbreviated(names: Sequence[str], most: int = 3) -> str:
    """The blocks that the names belong to with their number of tensors: `model.layers.0 (11), lm_head (1)`."""
    blocks = Counter[str]()
    for name in names:
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        blocks[".".join(parts[: number + 1] if number is not None else parts[:-1] or parts)] += 1
    shown = [f"{block} ({count})" for block, count in blocks.items()]
    return ", ".join(shown[:most]) + (f", and {len(shown) - most} more" if len(shown) > most else "")
