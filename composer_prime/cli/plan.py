"""`composer-prime plan`: what a recipe means, and what its outer loop moves, before anything is started."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from composer_prime.cli.recipe_args import RecipeArgument, read_recipe

if TYPE_CHECKING:
    from composer_prime.config import Recipe
    from composer_prime.outer.fragments import Fragment


def plan(context: typer.Context, recipe: RecipeArgument) -> None:
    """Print the resolved recipe, the fragments, and the bytes a round moves."""
    resolved = read_recipe(recipe, context.args)
    print("\n".join(plan_lines(resolved)))


def plan_lines(recipe: "Recipe") -> Iterator[str]:
    """The plan, line by line. Builds the model without weights; raises ModelError or ConfigError."""
    from composer_prime.config.toml import to_toml
    from composer_prime.outer.fragments import plan_fragments
    from composer_prime.sites.embedded.shapes import named_shapes

    yield to_toml(recipe.to_data())
    shapes = named_shapes(recipe.model.name)
    if recipe.outer is None:
        (whole,) = plan_fragments(shapes, 1)
        yield f"no outer loop: one site trains {whole.numel:,} parameters alone"
        return
    fragments = plan_fragments(shapes, recipe.outer.fragments)
    yield from _fragment_lines(fragments)
    yield ""
    yield from _traffic_lines(recipe, fragments)


def _fragment_lines(fragments: "Sequence[Fragment]") -> Iterator[str]:
    yield f"{'fragment':>8}  {'parameters':>12}  {'fp32 bytes':>12}  tensors"
    for fragment in fragments:
        names = _abbreviated(fragment.names)
        yield f"{fragment.index:>8}  {fragment.numel:>12,}  {_size(fragment.nbytes):>12}  {names}"
    total = sum(fragment.numel for fragment in fragments)
    yield f"{'all':>8}  {total:>12,}  {_size(sum(f.nbytes for f in fragments)):>12}"


def _traffic_lines(recipe: "Recipe", fragments: "Sequence[Fragment]") -> Iterator[str]:
    """What one site sends and fetches in a round of all fragments, for each codec; the recipe's is marked."""
    from composer_prime.outer.codecs import CODECS

    assert recipe.outer is not None
    others = max(recipe.sites.count, 2) - 1
    yield (
        f"a round of all {len(fragments)} fragments takes {recipe.outer.inner_steps} inner steps, one fragment every "
        f"{recipe.outer.due_every}; {recipe.rounds} rounds in {recipe.max_steps} steps; per round and site, "
        f"{others + 1} sites:"
    )
    yield f"{'codec':>8}  {'up':>12}  {'down':>12}"
    for name, codec in CODECS.items():
        up = sum(codec.nbytes(fragment.numel) for fragment in fragments)
        mark = "  <- outer.codec" if name == recipe.outer.codec else ""
        yield f"{name:>8}  {_size(up):>12}  {_size(up * others):>12}{mark}"


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
