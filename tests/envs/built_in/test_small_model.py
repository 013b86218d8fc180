"""The model `small-tools`: the one that uses tools, larger. Its warm-up is for a GPU and isn't made here."""

import math

from composer_prime.sites.embedded.model import named_shapes


def numel(name: str) -> int:
    return sum(math.prod(shape) for _, shape in named_shapes(name))


def test_it_has_30_million_parameters_and_the_vocabulary_of_tiny_tools() -> None:
    assert 25e6 < numel("small-tools") < 35e6
    small, tiny = (dict(named_shapes(name))["model.embed_tokens.weight"] for name in ("small-tools", "tiny-tools"))
    assert small[0] == tiny[0]
