"""Whether the packages of environments and monitors are installed, without importing anything."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder

from composer_prime.config.recipe import Recipe, module_of
from composer_prime.errors import INSTALL, ConfigError, EnvError


def package_checks(recipe: Recipe) -> list[Callable[[], None]]:
    """`check_installed` of each of a recipe's environments, and `check_monitor` of each of its monitors."""
    environments = [partial(check_installed, source.env.taskset.id) for source in recipe.orchestrator.train.source]
    return [*environments, *(partial(check_monitor, name) for name in recipe.monitors.model_dump(exclude_none=True))]


def check_monitor(name: str) -> None:
    """Raise ConfigError unless the package is installed; a folder of its name, which wandb makes, is none."""
    if not any(importlib.metadata.distributions(name=name)):
        raise ConfigError(f"monitors.{name} needs {name}, which isn't installed: {INSTALL.format(name)}")


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
