"""What a run is told: the recipe, how it is read and checked, and where its files lie. No torch here.

Who needs one name of it waits for no more than the module that holds it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_prime.config.launch import LaunchConfig
    from composer_prime.config.load import any_from_data, load_any, load_recipe, recipe_from_data
    from composer_prime.config.outer import OuterConfig, SiteConfig, SiteOverrides, SitesConfig
    from composer_prime.config.paths import RunPaths, SitePaths, models_cache, run_uri, store_uri
    from composer_prime.config.prime_rl import PrimeRecipe
    from composer_prime.config.recipe import Recipe, RecipeBase
    from composer_prime.config.settings import SiteSettings, settle_site

_HOMES = {
    "LaunchConfig": "launch",
    "OuterConfig": "outer",
    "PrimeRecipe": "prime_rl",
    "Recipe": "recipe",
    "RecipeBase": "recipe",
    "RunPaths": "paths",
    "SiteConfig": "outer",
    "SiteOverrides": "outer",
    "SitePaths": "paths",
    "SiteSettings": "settings",
    "SitesConfig": "outer",
    "any_from_data": "load",
    "load_any": "load",
    "load_recipe": "load",
    "models_cache": "paths",
    "recipe_from_data": "load",
    "run_uri": "paths",
    "settle_site": "settings",
    "store_uri": "paths",
}

__all__ = [
    "LaunchConfig",
    "OuterConfig",
    "PrimeRecipe",
    "Recipe",
    "RecipeBase",
    "RunPaths",
    "SiteConfig",
    "SiteOverrides",
    "SitePaths",
    "SiteSettings",
    "SitesConfig",
    "any_from_data",
    "load_any",
    "load_recipe",
    "models_cache",
    "recipe_from_data",
    "run_uri",
    "settle_site",
    "store_uri",
]


def __getattr__(name: str) -> Any:
    """A name's module is imported when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
