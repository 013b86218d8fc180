"""`plan` says of every recipe what its sites will listen on."""

from pathlib import Path

import pytest

from composer_prime.config.load import load_any
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.sites.listening import listening_lines

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_listens_is_named_with_who_can_reach_it(path: Path) -> None:
    recipe = load_any(path)
    lines = list(listening_lines(recipe))
    assert lines and all(line.startswith("listens: ") for line in lines)
    several = isinstance(recipe, PrimeRecipe) and recipe.upstream_value("deployment.type") == "multi_node"
    assert any("0.0.0.0" in line for line in lines) == several
    if not several:
        assert any("127.0.0.1" in line for line in lines)
    if isinstance(recipe, PrimeRecipe):
        assert all("without a token" in line for line in lines)
