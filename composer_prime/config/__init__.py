"""What a run is told: the recipe, how it is read and checked, and where its files lie. No torch here."""

from composer_prime.config.launch import LaunchConfig
from composer_prime.config.load import any_from_data, load_any, load_recipe, recipe_from_data
from composer_prime.config.outer import OuterConfig, SiteConfig, SiteOverrides, SitesConfig
from composer_prime.config.paths import RunPaths, SitePaths, models_cache, run_uri, store_uri
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.config.settings import SiteSettings, settle_site

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
