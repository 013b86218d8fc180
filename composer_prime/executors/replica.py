"""What a replica is told to run: its attempt's intent in the bucket, and the recipe that this names by its hash."""

import tomllib
from contextlib import closing

from composer_prime.config import PrimeRecipe, Recipe, any_from_data, run_uri
from composer_prime.errors import BadInput
from composer_prime.executors.records import open_launch
from composer_prime.store import open_store


def read_order(uri: str, launch: int, site: str, attempt: int) -> Recipe | PrimeRecipe:
    """The recipe of one attempt of one launch of the run at `uri`.

    Raises BadInput when that launch, the site or the attempt was ended, when there is no such attempt, and when the
    recipe is another run's; CorruptObject when the recipe's bytes aren't those that were launched.
    """
    with closing(open_store(uri)) as store:
        book = open_launch(store, launch)
        stop = book.stopped() or book.stopped(site)
        if stop is not None:
            raise BadInput(
                f"launch {book.name}, or its site {site}, was stopped on {stop.by}: this replica doesn't start"
            )
        mine = book.attempt(site, attempt)
        if mine.ended is not None or mine.verdict is not None:
            raise BadInput(f"attempt {attempt} of site {site} was ended before its start: this replica doesn't start")
        text = book.recipe(mine.intent.recipe)
    recipe = any_from_data(tomllib.loads(text))
    if run_uri(recipe) != uri:
        raise BadInput(
            f"the recipe launched at {uri} is of the run at {run_uri(recipe)}: give the folder that was launched"
        )
    return recipe
