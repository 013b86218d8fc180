"""Fixtures of tests that play real rollouts, which the sites' tests have too."""

from tests.sites.conftest import run_async, tokenizer_dir

__all__ = ["run_async", "tokenizer_dir"]
