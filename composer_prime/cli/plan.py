"""`composer-prime plan`: what a recipe means, and what its outer loop moves, before anything is started."""

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.cli.recipe_args import RecipeArgument, read_recipe
from composer_prime.redaction import Redactor, secret_values

if TYPE_CHECKING:
    from composer_prime.config import RecipeBase
    from composer_prime.outer.forecast import Pace
    from composer_prime.outer.fragments import Fragment


DEFAULT_STEP_S = 0.03
SMALL, LEAST_LR = 100_000_000, 1e-5
"""Below so many parameters a learning rate below this is warned of."""


def plan(
    context: typer.Context,
    recipe: RecipeArgument,
    link_mbit: Annotated[
        float | None, typer.Option(min=0.001, help="Mbit/s of a site's link, each way: predict utilisation.")
    ] = None,
    step_s: Annotated[float, typer.Option(min=0.0001, help="Seconds of an inner step, as your trainer takes.")] = (
        DEFAULT_STEP_S
    ),
    site_cores: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Cores that a site has, where sites share a machine: 0.5 for four on two. None: enough."
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="First look, as `run` does, for all that is wrong.")] = False,
) -> None:
    """Print the resolved recipe, the fragments, and the bytes a round moves; with a link, how long that takes."""
    resolved = read_recipe(recipe, context.args)
    if check:
        from composer_prime.sites.preflight import check as preflight

        print(preflight(resolved, resolved.site_names)[1])
    redactor = Redactor(secret_values(os.environ))
    print(redactor.text("\n".join(plan_lines(resolved, link_mbit, step_s, site_cores))))


def plan_lines(
    recipe: "RecipeBase",
    link_mbit: float | None = None,
    step_s: float = DEFAULT_STEP_S,
    site_cores: float | None = None,
) -> Iterator[str]:
    """The plan, line by line. Builds the model without weights; raises ModelError or ConfigError."""
    from composer_prime.config.toml import to_toml
    from composer_prime.outer.fragments import plan_fragments
    from composer_prime.sites.embedded.shapes import named_shapes
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
    yield from _traffic_lines(recipe, fragments, step_s)
    yield from _memory_lines(recipe, fragments)
    if link_mbit is not None:
        yield ""
        yield from _link_lines(recipe, fragments, link_mbit, _pace(recipe, step_s, site_cores))


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
        yield f"{fragment.index:>8}  {fragment.numel:>12,}  {_size(fragment.nbytes):>12}  {names}"
    total = sum(fragment.numel for fragment in fragments)
    yield f"{'all':>8}  {total:>12,}  {_size(sum(f.nbytes for f in fragments)):>12}"


def _traffic_lines(recipe: "RecipeBase", fragments: "Sequence[Fragment]", step_s: float) -> Iterator[str]:
    """What one site sends and fetches in a round of all fragments, for each codec; the recipe's is marked."""
    from composer_prime.outer.codecs import CODECS
    from composer_prime.outer.forecast import payloads_of, turn_bytes

    outer, pace = recipe.outer, _pace(recipe, step_s)
    assert outer is not None
    yield (
        f"a round of all {len(fragments)} fragments takes {outer.inner_steps} inner steps, one fragment every "
        f"{outer.due_every}; {recipe.rounds} rounds in {recipe.max_steps} steps; per round and site, "
        f"{pace.sites} sites:"
    )
    yield f"{'codec':>8}  {'up':>12}  {'down':>12}"
    for name in CODECS:
        payloads = payloads_of([fragment.numel for fragment in fragments], name, outer.merged_codec, outer.slices)
        up, down = (sum(way) for way in zip(*(turn_bytes(payload, pace) for payload in payloads), strict=True))
        yield f"{name:>8}  {_size(up):>12}  {_size(down):>12}{_mark(recipe, name)}"
    yield _join_line(recipe, fragments, pace)
    yield from _egress_lines(recipe, fragments, pace)


def _join_line(recipe: "RecipeBase", fragments: "Sequence[Fragment]", pace: "Pace") -> str:
    """What a site that comes late fetches before it trains."""
    from composer_prime.outer.forecast import join_bytes, payloads_of

    outer = recipe.outer
    assert outer is not None
    numels = [fragment.numel for fragment in fragments]
    payloads = payloads_of(numels, outer.codec, outer.merged_codec, outer.slices)
    found = join_bytes(payloads, pace, momentum=outer.momentum > 0)
    return (
        f"a site that joins fetches {_size(found.newest_bytes)} of masters, or {_size(found.first_bytes)} of the first "
        f"ones (none if it has the model) and {_size(found.round_bytes)} for each round since, as is quicker"
    )


def _memory_lines(recipe: "RecipeBase", fragments: "Sequence[Fragment]") -> Iterator[str]:
    """What the outer loop needs beside a PRIME-RL; nothing where less than the whole model is trained."""
    from composer_prime.config import PrimeRecipe
    from composer_prime.outer.forecast import host_bytes

    outer = recipe.outer
    assert outer is not None
    if not isinstance(recipe, PrimeRecipe) or recipe.upstream_value("trainer.model.lora"):
        return
    numels = [fragment.numel for fragment in fragments]
    payloads = min(_pace(recipe, DEFAULT_STEP_S).sites, outer.gather_sites)
    found = host_bytes(sum(numels), max(numels), momentum=outer.momentum > 0, payloads=payloads)
    yield (
        f"host memory of a trainer's first rank, beside PRIME-RL's own: {_size(found.training)}, and "
        f"{_size(found.closing)} as the run ends"
    )


def _egress_lines(recipe: "RecipeBase", fragments: "Sequence[Fragment]", pace: "Pace") -> Iterator[str]:
    """What the whole run's fetching costs; nothing where the store is a folder, or none is named."""
    from composer_prime.config import store_uri
    from composer_prime.executors.prices import egress_usd_per_gb
    from composer_prime.launch.preflight import traffic_line

    uri = store_uri(recipe)
    if uri is not None and egress_usd_per_gb(uri)[0] != 0:  # no folder
        yield traffic_line(recipe, [fragment.numel for fragment in fragments], pace.sites, uri)


def _link_lines(recipe: "RecipeBase", fragments: "Sequence[Fragment]", link_mbit: float, pace: "Pace") -> Iterator[str]:
    """How long a round takes over a link of that rate, for each codec: what `bench link` measures."""
    from composer_prime.outer.codecs import CODECS
    from composer_prime.outer.forecast import forecast, payloads_of

    outer = recipe.outer
    assert outer is not None
    yield (
        f"over {link_mbit:g} Mbit/s each way, inner steps of {pace.step_s:g} s, tau {outer.sync_delay}; seconds per "
        f"turn of a fragment and per round:"
    )
    yield f"{'codec':>8}  {'transfer':>9}  {'stall':>9}  {'round':>9}  {'at least':>9}  {'utilisation':>11}"
    for name in CODECS:
        payloads = payloads_of([fragment.numel for fragment in fragments], name, outer.merged_codec, outer.slices)
        found = forecast(payloads, pace, name, link_mbit)
        per_turn = (found.transfer_s / len(fragments), found.stall_s / len(fragments))
        seconds = "  ".join(f"{value:>9.3f}" for value in (*per_turn, found.round_s, found.bound_s))
        yield f"{name:>8}  {seconds}  {found.utilisation:>11.1%}{_mark(recipe, name)}"


def _mark(recipe: "RecipeBase", codec: str) -> str:
    return "  <- outer.codec" if recipe.outer is not None and codec == recipe.outer.codec else ""


def _pace(recipe: "RecipeBase", step_s: float, site_cores: float | None = None) -> "Pace":
    """How often the recipe's sites meet: those that start here, and those it names; at least two, since one alone
    fetches nothing."""
    from composer_prime.outer.forecast import Pace, crowding

    outer = recipe.outer
    assert outer is not None
    crowded = 1.0 if site_cores is None else crowding(site_cores)
    steps = outer.inner_steps if outer.pace == "steps" else max(1, round(outer.inner_seconds / step_s))
    sites = max(recipe.sites.count, len(recipe.sites.overrides), len(outer.keys), 2)
    return Pace(steps, outer.fragments, outer.sync_delay, step_s, sites, outer.gather_sites, crowded)


def _abbreviated(names: Sequence[str], limit: int = 60) -> str:
    """The blocks that the names belong to with their number of tensors: `model.layers.0 (11), lm_head (1)`."""
    blocks: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        block = ".".join(parts[: number + 1] if number is not None else parts[:-1] or parts)
        blocks[block] = blocks.get(block, 0) + 1
    shown: list[str] = []
    for place, (block, count) in enumerate(blocks.items()):
        if shown and len(", ".join(shown)) + len(block) > limit:
            return ", ".join(shown) + f", and {len(blocks) - place} more"
        shown.append(f"{block} ({count})")
    return ", ".join(shown)


def _size(num_bytes: int) -> str:
    """Bytes for people: 1.72 MB."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    power = min((len(str(num_bytes)) - 1) // 3, 4)
    return f"{num_bytes / 1000**power:.2f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
