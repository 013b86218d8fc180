"""The smallest recipe that is complete, for tests that change one thing in it."""

from typing import Any

from composer_prime.config import Recipe, recipe_from_data


def minimal(**tables: Any) -> dict[str, Any]:
    """The data of a minimal recipe, top-level keys replaced by `tables`."""
    return {
        "run": {"name": "test"},
        "max_steps": 40,
        "orchestrator": {"train": {"source": [{"name": "letters", "env": {"taskset": {"id": "reverse-letters"}}}]}},
        **tables,
    }


def recipe(**tables: Any) -> Recipe:
    """A minimal recipe, top-level keys replaced by `tables`."""
    return recipe_from_data(minimal(**tables))
