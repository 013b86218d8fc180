"""The doctor at work: looks at this machine and its way to the bucket, for a run, for a recipe, or for nothing.

The looking is done here, the judging in `doctor`.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from composer_prime.config.paths import run_uri
from composer_prime.config.recipe import RecipeBase
from composer_prime.redaction import SECRET_NAMES_VARIABLE
from composer_prime.store import open_store, probe_store
from composer_prime.store.base import Store
from composer_prime.sync.terms import terms_of
from composer_prime.volunteers.consent import invited_recipe
from composer_prime.volunteers.doctor import Check, Diagnosis, Task, diagnose, package_checks
from composer_prime.volunteers.entrance import Entrance, check_date, enter, lent_key, own_key
from composer_prime.volunteers.folder import VolunteerFolder
from composer_prime.volunteers.invitation import Invitation, adopt_environment
from composer_prime.volunteers.link import clock_ahead_s, endpoint_of, measure
from composer_prime.volunteers.machine import Machine, look
from composer_prime.volunteers.places import check_place
from composer_prime.volunteers.wishes import Wishes


@contextmanager
def looking(folder: Path) -> Iterator[Future[Machine]]:
    """Look at this machine meanwhile: torch's import takes as long as going in and the link together."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="look")
    try:
        yield pool.submit(look, folder)
    finally:
        pool.shutdown(wait=False)


def examine(
    recipe: RecipeBase,
    entrance: Entrance,
    store: Store,
    wishes: Wishes,
    machine: Future[Machine],
    *,
    keep_batch: bool = False,
) -> Diagnosis:
    """What this machine can do for a run. keep_batch: the recipe's batch is the one that the site has had until now."""
    endpoint = endpoint_of(store.uri)
    task = Task(
        recipe=recipe,
        terms=entrance.terms,
        shapes=[(parameter.name, parameter.shape) for parameter in entrance.manifest.parameters],
        num_sites=entrance.num_sites,
        test_vector=entrance.manifest.test_vector,
        max_disk_bytes=wishes.max_disk_bytes,
        keep_batch=keep_batch,
    )
    link = replace(measure(store, entrance.site), up_cap=wishes.mbit_up, down_cap=wishes.mbit_down)
    ahead_s = None if endpoint is None else clock_ahead_s(endpoint)
    return diagnose(machine.result(), task, link, ahead_s)


def examine_machine(wishes: Wishes) -> Diagnosis:
    """What this machine has."""
    return diagnose(look(wishes.folder or Path.cwd()), None, None, None)


def examine_for_invitation(invitation: Invitation, wishes: Wishes) -> Diagnosis:
    """What this machine can do for the run of an invitation, which is checked, too. Nothing is left behind."""
    check_place(invitation, allow_local=wishes.allow_local)
    check_date(invitation, time.time())
    key = own_key(invitation, wishes.key_file)
    adopt_environment(invitation, use_my_aws=wishes.use_my_aws)
    folder = VolunteerFolder.default(invitation.run) if wishes.folder is None else wishes.folder
    with looking(folder.expanduser()) as machine, lent_key(key), closing(open_store(invitation.uri)) as store:
        entrance = enter(invitation, store, key, starting=False)
        recipe = invited_recipe(invitation, wishes)
        return examine(recipe, entrance, store, wishes, machine)


def examine_for_recipe(recipe: RecipeBase, wishes: Wishes) -> Diagnosis:
    """What this machine can do for a site of a recipe, whose run need not be there yet."""
    from composer_prime.sites.embedded.shapes import named_shapes

    shapes = named_shapes(recipe.model.name)
    task = Task(recipe, terms_of(recipe), shapes, recipe.sites.count + 1, max_disk_bytes=wishes.max_disk_bytes)
    machine, uri = look(wishes.folder or recipe.output_dir), run_uri(recipe)
    if uri is None or recipe.outer is None or recipe.outer.store is None:
        return diagnose(machine, task, None, None)
    endpoint = endpoint_of(uri)
    with closing(open_store(uri)) as store:
        up, down = wishes.mbit_up or recipe.site.max_mbit_up, wishes.mbit_down or recipe.site.max_mbit_down
        link = replace(measure(store, recipe.site.name), up_cap=up, down_cap=down)
    return diagnose(machine, task, link, None if endpoint is None else clock_ahead_s(endpoint))


def examine_job(recipe: RecipeBase, uri: str) -> Diagnosis:
    """What a launch's job finds on its machine, which may be smaller than a site's: packages, secrets, the bucket.

    Raises StoreUnusable.
    """
    endpoint = endpoint_of(uri)
    with closing(open_store(uri)) as store:
        probe_store(store, may_overwrite=recipe.outer is not None and recipe.outer.committer is not None)
        link = measure(store)
    found = diagnose(look(Path.cwd()), None, link, None if endpoint is None else clock_ahead_s(endpoint))
    names = list(filter(None, os.environ.get(SECRET_NAMES_VARIABLE, "").split(",")))
    lost = [f"{name} isn't set" for name in names if not os.environ.get(name)]
    secrets = Check("secrets", "fail" if lost else "ok", ", ".join(lost or names) or "none")
    return replace(found, checks=(*found.checks, *package_checks(recipe), secrets))
