"""Whether this machine has the packages and the device that a recipe names, without importing what is large."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder

from composer_prime.config.recipe import MAKER, TINY_MODELS, Recipe, module_of
from composer_prime.errors import INSTALL, ConfigError, EnvError, ModelError


def package_checks(recipe: Recipe) -> list[Callable[[], None]]:
    """`check_maker` of a recipe's model, `check_installed` of each of its environments, and `check_monitor` of each of
    its monitors."""
    environments = [partial(check_installed, source.env.taskset.id) for source in recipe.orchestrator.train.source]
    monitors = [partial(check_monitor, name) for name in recipe.monitors.model_dump(exclude_none=True)]
    return [partial(check_maker, recipe.model.name), *environments, *monitors]


def check_maker(name: str) -> None:
    """Raise ModelError for one of TINY_MODELS unless the package that makes these is installed."""
    if name not in TINY_MODELS:
        return
    try:
        found = importlib.util.find_spec(f"{MAKER}.built_in")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ModelError(
            f"model.name ({name}) is made by a package that isn't installed (there is no module {MAKER}.built_in): in "
            "the clone of composer-prime, pip install ./envs/tiny_policy"
        )


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


def check_device(device: str) -> None:
    """Raise ConfigError where this machine's torch doesn't have it. Torch is imported for others than the CPU."""
    if device == "cpu":
        return
    import torch

    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not found.get(device):
        here = ", ".join(name for name, is_here in found.items() if is_here)
        raise ConfigError(
            f'device ("{device}") must be cpu, cuda or mps and one that torch has, and torch {torch.__version__} has '
            f"{here} here: take that, or install a driver and a torch that are built for another"
        )
