"""A run without a site: its manifest and first masters from given weights, or from the present masters of another run.

Settings of a run never change. Whoever wants others starts a new run from where the old one stands: same weights, outer
momentum at zero.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from composer_prime.errors import BadInput, KeyMissing
from composer_prime.outer.chunks import empty
from composer_prime.outer.pseudograd import places
from composer_prime.store.base import Store
from composer_prime.sync.founding import changed_terms
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.replica import Replica
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import load_run
from composer_prime.sync.runtime import Runtime, ThreadRuntime
from composer_prime.sync.start import Founding, found_run
from composer_prime.sync.terms import Terms

CREATOR = "create"
"""What a manifest says of its creator when that was no site."""


def create_run(
    store: Store, terms: Terms, run: str, weights: Mapping[str, Tensor], founding: Founding, runtime: Runtime
) -> None:
    """Write a run whose first masters are `weights`: any float dtype, by the trainers' parameter names, in their order.

    Raises BadInput when the store holds a run already, and nothing is written then.
    """
    check_unused(store, terms)
    if not found_run(store, terms, run, CREATOR, LocalParameters(weights), runtime, founding):
        raise BadInput(f"{store.uri} got another run at the same moment, which stays: look at it with `status`")


def check_unused(store: Store, terms: Terms) -> None:
    """Raise BadInput when a run is there; where its settings differ from `terms`, with the way to change them."""
    try:
        found = load_run(store)
    except KeyMissing:
        return
    changed = changed_terms(found.manifest.terms, terms)
    if not changed:
        raise BadInput(f"{store.uri} holds run {found.manifest.run} with these settings already: start its sites")
    raise BadInput(
        f"run {found.manifest.run} in {store.uri} has other settings, which never change ({changed}): start a new run "
        f"from its present masters with `composer-prime create RECIPE --run.name NEW --from {store.uri}`"
    )


def present_weights(store: Store) -> dict[str, Tensor]:
    """The parameters of the run in `store` as its newest masters have them, fp32, by name in the model's order.

    Follows the log beyond the newest snapshot; writes nothing. Raises BadInput when there is no run.
    """
    find_manifest(store)
    run, runtime = load_run(store), ThreadRuntime()
    roster = Roster(store, run.manifest, run.sha256)
    whole = {p.name: empty(math.prod(p.shape)).view(p.shape) for p in run.manifest.parameters}
    try:
        for fragment in run.fragments:
            replica = Replica(store, run, fragment.index, runtime=runtime, roster=roster, site="")
            while replica.advance():
                pass
            for parameter, start, stop in places(whole, fragment):
                parameter.view(-1).copy_(replica.master.weights[start:stop])
    finally:
        runtime.close()
    return whole
