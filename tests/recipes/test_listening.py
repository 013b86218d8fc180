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
    in_pods = path.stem == "reverse_text_k8s"
    assert any("0.0.0.0" in line for line in lines) == (several or in_pods)
    if not several:
        assert any("127.0.0.1" in line for line in lines)
    if isinstance(recipe, PrimeRecipe):
        assert all("without a token" in line for line in lines)
        assert "all addresses" in lines[-1], "torch knows no other"
    else:
        assert all("token" in line or "secret" in line or "this user" in line for line in lines)


def test_sites_that_share_a_machine_are_shown_with_the_ports_that_they_get() -> None:
    path = next(path for path in RECIPES if path.stem == "reverse_text_2")
    changes = ["--sites.count", "2", "--prime_rl.first_port", "13000"]
    (line,) = [line for line in listening_lines(load_any(path, changes)) if "inference" in line]
    assert "port 13000, and 13100 behind it, 200 more for each site after the first, on 127.0.0.1" in line
