"""What a run is told: the recipe, how it is read and checked, and where its files lie. No torch here.

Who needs one name of it waits for no more than the module that holds it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_prime.config.load import any_from_data, load_any, load_recipe, recipe_from_data
    from composer_prime.config.outer import LaunchConfig, OuterConfig, SiteConfig, SiteOverrides, SitesConfig
    from composer_prime.config.paths import RunPaths, SitePaths, models_cache, run_uri, store_uri
    from composer_prime.config.prime_rl import PrimeRecipe
    from composer_prime.config.recipe import Recipe, RecipeBase
    from composer_prime.config.settings import SiteSettings, settle_site

__all__ = [
    "LaunchConfig", "OuterConfig", "PrimeRecipe", "Recipe", "RecipeBase", "RunPaths", "SiteConfig", "SiteOverrides",
    "SitePaths", "SiteSettings", "SitesConfig", "any_from_data", "load_any", "load_recipe", "models_cache",
    "recipe_from_data", "run_uri", "settle_site", "store_uri",
]  # fmt: skip

_HOMES = {
    "load": ("any_from_data", "load_any", "load_recipe", "recipe_from_data"),
    "outer": ("LaunchConfig", "OuterConfig", "SiteConfig", "SiteOverrides", "SitesConfig"),
    "paths": ("RunPaths", "SitePaths", "models_cache", "run_uri", "store_uri"),
    "prime_rl": ("PrimeRecipe",),
    "recipe": ("Recipe", "RecipeBase"),
    "settings": ("SiteSettings", "settle_site"),
}


def __getattr__(name: str) -> Any:
    """A name's module is imported when it is first asked for."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
