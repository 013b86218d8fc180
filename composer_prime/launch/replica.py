"""What a replica runs: the recipe whose sha256 its command line names, which comes from whoever launched it.

Nothing in the bucket chooses another. Its attempt's records there can only keep it from starting.
"""

from contextlib import closing

from composer_prime.config import PrimeRecipe, Recipe
from composer_prime.errors import BadInput
from composer_prime.launch.records import open_launch
from composer_prime.store import open_store


def read_order(uri: str, launch: int, site: str, attempt: int, recipe_sha: str) -> Recipe | PrimeRecipe:
    """The recipe with that sha256, for one attempt of one launch of the run at `uri`.

    Raises BadInput when that launch, the site or the attempt was ended, when there is no such attempt, and when the
    recipe is another run's; CorruptObject when its bytes in the bucket have another hash.
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
        return book.recipe(recipe_sha, uri)
