"""PRIME-RL recipes for tests that change one thing in them."""

from pathlib import Path
from typing import Any

from composer_prime.config import PrimeRecipe, any_from_data


def minimal(**tables: Any) -> dict[str, Any]:
    """The data of a small recipe with an outer loop, top-level keys replaced by `tables`."""
    return {
        "run": {"name": "test"},
        "max_steps": 20,
        "seq_len": 2048,
        "site": {"backend": "prime-rl"},
        "model": {"name": "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"},
        "orchestrator": {
            "batch_size": 128,
            "group_size": 16,
            "renderer": {"name": "prime-qwen3"},
            "train": {
                "sampling": {"max_completion_tokens": 128},
                "source": [
                    {
                        "name": "reverse-text",
                        "env": {
                            "taskset": {"id": "reverse-text"},
                            "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
                        },
                    }
                ],
            },
        },
        "trainer": {"optim": {"lr": 3e-6}, "loss": {"kwargs": {"kl_tau": 1e-3}}},
        "inference": {},
        "ckpt": {"interval": 10},
        "outer": {"inner_steps": 10, "fragments": 2},
        **tables,
    }


def prime_recipe(tmp_path: Path | None = None, **tables: Any) -> PrimeRecipe:
    """A small recipe, its run under `tmp_path` where that is given."""
    data = minimal(**tables)
    if tmp_path is not None:
        data = {"output_dir": str(tmp_path), **data}
    recipe = any_from_data(data)
    assert isinstance(recipe, PrimeRecipe)
    return recipe
