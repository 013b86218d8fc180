"""What a replica is told to run: its attempt's intent in the bucket, and the recipe that this names by its hash."""

import tomllib
from contextlib import closing

from composer_prime.config import PrimeRecipe, Recipe, any_from_data, run_uri
from composer_prime.errors import BadInput
from composer_prime.executors.records import open_launch
from composer_prime.store import open_store


def read_order(uri: str, site: str, attempt: int) -> Recipe | PrimeRecipe:
    """The recipe of one attempt of the newest launch of the run at `uri`.

    Raises BadInput when that launch was stopped or has no such attempt, or the recipe is another run's; CorruptObject
    when the recipe's bytes aren't those that were launched.
    """
    with closing(open_store(uri)) as store:
        book = open_launch(store)
        stop = book.stopped()
        if stop is not None:
            raise BadInput(f"launch {book.name} was stopped on {stop.by}: this replica doesn't start")
        text = book.recipe(book.attempt(site, attempt).intent.recipe)
    recipe = any_from_data(tomllib.loads(text))
    if run_uri(recipe) != uri:
        raise BadInput(
            f"the recipe launched at {uri} is of the run at {run_uri(recipe)}: give the folder that was launched"
        )
    return recipe
