"""The bench of codecs measures every codec and prints sizes; times are for people and not asserted."""

import torch

from composer_prime.bench import codecs as bench_codecs
from composer_prime.outer.codecs import get_codec


def test_figures_are_those_of_the_codec():
    figures = bench_codecs.measure(get_codec("fp32"), torch.ones(1000), repeats=1)
    assert (figures.ratio, figures.error, figures.cosine) == (1.0, 0.0, 1.0)
    heavy = bench_codecs.make_vectors(50_000)["heavy-tailed"]
    errors = [
        bench_codecs.measure(get_codec(name), heavy, repeats=1).error for name in ("bf16", "int8", "int4", "topk")
    ]
    assert errors == sorted(errors)
