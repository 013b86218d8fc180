"""`composer-prime create`: a run in its bucket before any site has started.

First masters are written at once where the trainers' parameters are the model's own: embedded sites, and PRIME-RL with
`model.impl = "hf"` and no LoRA. Elsewhere names and shapes follow from the trainer's code, so that the run is only
announced, and its first site founds it with the weights that it has loaded.
"""

from contextlib import closing
from typing import Literal

from torch import Tensor

from composer_prime.config.paths import models_cache, run_uri
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import RecipeBase
from composer_prime.errors import ConfigError
from composer_prime.outer.fragments import trainable
from composer_prime.store import open_store, race_store
from composer_prime.sync.creating import check_unused, create_run, present_weights
from composer_prime.sync.founding import FoundingRecord, announce, first_keys
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.start import Founding
from composer_prime.sync.terms import terms_of

FirstMasters = Literal["auto", "now", "first-site"]


def create(recipe: RecipeBase, first_masters: FirstMasters = "auto", source: str | None = None) -> str:
    """Write the recipe's run into its bucket; what was done, in one line.

    first_masters  "now": from the model's checkpoint; "first-site": by the first site that joins
    source         the root of another run, whose present masters become the first ones of this run

    Raises BadInput when a run is there already, when the model can't be read, or when the store won't do.
    """
    uri, terms = run_uri(recipe), terms_of(recipe)
    assert uri is not None and recipe.outer is not None  # `terms_of` has looked
    outer, name, admitted = recipe.outer, recipe.run.name, first_keys(recipe, recipe.site.name)
    if source is not None and first_masters == "first-site":
        raise ConfigError("--from and --weights first-site exclude each other: the first masters are the other run's")
    with closing(open_store(uri)) as store:
        check_unused(store, terms)
        if first_masters == "auto":
            first_masters = "now" if source is not None or _has_the_models_names(recipe) else "first-site"
        if first_masters == "first-site":
            race_store(store)
            announce(store, FoundingRecord(run=name, terms=terms, owner=outer.owner, keys=admitted))
            return f"announced run {name} in {uri}: its first site founds it with the weights that it has loaded"
        weights, parent = (_checkpoint(recipe), None) if source is None else _masters(source)
        runtime = ThreadRuntime()
        try:
            founding = Founding(outer.owner, admitted, race_store, parent=parent)
            create_run(store, terms, name, weights, founding, runtime)
        finally:
            runtime.close()
    origin = recipe.model.name if source is None else f"the present masters of {source}"
    return f"created run {name} in {uri} from {origin}: start its sites"


def _has_the_models_names(recipe: RecipeBase) -> bool:
    """Whether the trainers' parameters have the names and shapes of the model as transformers loads it."""
    if not isinstance(recipe, PrimeRecipe):
        return True
    return recipe.upstream_value("trainer.model.impl") == "hf" and recipe.upstream_value("trainer.model.lora") is None


def _checkpoint(recipe: RecipeBase) -> dict[str, Tensor]:
    from composer_prime.sites.embedded.model import load_policy, resolve_model

    folder = resolve_model(recipe.model.name, recipe.run.seed, models_cache())
    return dict(trainable(load_policy(folder).named_parameters()))


def _masters(source: str) -> tuple[dict[str, Tensor], str]:
    """The present weights of a run, and its manifest's sha256."""
    with closing(open_store(source)) as store:
        return present_weights(store), find_manifest(store)[1]
