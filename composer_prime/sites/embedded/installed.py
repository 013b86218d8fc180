"""Whether the package of an environment is installed, without importing anything."""

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder

from composer_prime.config.recipe import Recipe, module_of
from composer_prime.errors import EnvError


def environment_checks(recipe: Recipe) -> list[Callable[[], None]]:
    """`check_installed` of each of a recipe's environments."""
    return [partial(check_installed, source.env.taskset.id) for source in recipe.orchestrator.train.source]


def check_installed(taskset_id: str) -> None:
    """Raise EnvError unless a site's processes, which begin in this folder, find what verifiers would import."""
    module = module_of(taskset_id)
    if not module.isidentifier():
        raise EnvError(f"env.taskset.id ({taskset_id}) must be a package's name: such as reverse-letters")
    verifiers = importlib.util.find_spec("verifiers")
    bundled = [f"{place}/v1/tasksets" for place in (verifiers and verifiers.submodule_search_locations) or ()]
    there = module in sys.modules or importlib.util.find_spec(module)
    if not there and PathFinder.find_spec(module, [os.getcwd(), *bundled]) is None:
        raise EnvError(
            f"environment {taskset_id!r} isn't installed (there is no module {module!r}): "
            f"install its package, such as `pip install ./envs/{module}`"
        )
