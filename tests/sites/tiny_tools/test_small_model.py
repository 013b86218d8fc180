"""The model `small-tools`: the one that uses tools, larger. Its warm-up is for a GPU and isn't made here."""

import math

import pytest

from composer_prime.config import load_any
from composer_prime.sites.embedded.shapes import named_shapes
from tests.architecture import REPOSITORY


def numel(name: str) -> int:
    return sum(math.prod(shape) for _, shape in named_shapes(name))


def test_it_has_30_million_parameters_and_the_vocabulary_of_tiny_tools() -> None:
    assert 25e6 < numel("small-tools") < 35e6
    small, tiny = (dict(named_shapes(name))["model.embed_tokens.weight"] for name in ("small-tools", "tiny-tools"))
    assert small[0] == tiny[0]


@pytest.mark.parametrize("name", ["hints", "tools"])
def test_recipes_of_tiny_tools_take_it_on_a_gpu(name: str) -> None:
    path = REPOSITORY / f"recipes/local/{name}.toml"
    recipe = load_any(path, ["--model.name", "small-tools", "--site.device", "cuda"])
    assert (recipe.model.name, recipe.site.device) == ("small-tools", "cuda")
