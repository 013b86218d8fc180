"""What must stand before any site of a local run starts: a bucket that holds, one model folder, a port a site.

The model is resolved by a process of its own, since that needs torch and a supervisor shouldn't.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_prime.config.paths import RunPaths, models_cache, run_uri
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.config.settings import WITHOUT_WEIGHTS, SiteSettings, settle_site
from composer_prime.errors import ConfigError, FingerprintMismatch, StoreUnusable, SystemRefused
from composer_prime.private import users_umask
from composer_prime.sites.embedded.folder import check_new_run
from composer_prime.sites.embedded.ports import claim_port
from composer_prime.sites.embedded.processes import QUIET_ENV, Child
from composer_prime.sites.embedded.restarts import BAD_INPUT_EXIT
from composer_prime.sites.embedded.supervisor import bad_input, crashed
from composer_prime.sites.embedded.tokenizers_only import import_tokenizers
from composer_prime.store import keys, open_store, probe_store
from composer_prime.store.file import FileStore
from composer_prime.sync.founding import another_run, changed_terms
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.terms import terms_of
from composer_prime.teachers.fingerprint import load_tokenizer
from composer_prime.teachers.pool import TeacherPool

_POLL_S = 0.05
ROOM_BYTES = 16 * 2**20
"""What must fit into a folder that a run writes to."""


def model_command(recipe: Recipe) -> list[str]:
    """The command that makes the run's model a local folder and prints that folder's name last."""
    module = "composer_prime.sites.embedded.model"
    where = [str(models_cache()), recipe.site.device]
    served = ["vllm"] if recipe.inference.engine == "vllm" else []
    return [sys.executable, "-m", module, recipe.model.name, str(recipe.run.seed), *where, *served]


def joining_model_command(recipe: Recipe) -> list[str]:
    """As `model_command`, for a site of a run that is there: weights that this machine lacks aren't downloaded.

    vLLM starts from weights, and the first policy, where hints ask it, is those weights: they are needed all the same.
    """
    needs_weights = recipe.inference.engine == "vllm" or recipe.holds_first_policy
    return model_command(recipe) if needs_weights else [*model_command(recipe), WITHOUT_WEIGHTS]


def check_backend(recipe: Recipe) -> None:
    """Raise ConfigError for a recipe whose sites aren't ours to start, or not on this machine."""
    if recipe.site.backend != "embedded":
        raise ConfigError(
            f'site.backend ("{recipe.site.backend}") must be "embedded" for composer-prime run and site, '
            "which start processes on this machine: drop the key"
        )
    uri = run_uri(recipe)
    if uri is not None and uri.startswith("memory://"):
        raise ConfigError(
            f"outer.store ({uri}) lives in one process, and a site's trainer is a process of its own: name a folder or "
            "an s3:// bucket, or leave the key out"
        )


def check_room(what: str, folder: Path) -> None:
    """Raise StoreUnusable, with the cause, unless files of a run fit into a folder, which need not be there yet."""
    at = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=at) as file:
            file.write(bytes(ROOM_BYTES))
    except OSError as error:
        error.filename = None  # a name of no interest
        why = SystemRefused.of(error, at, then="") or f"{error.strerror}: name a folder that can be written"
        raise StoreUnusable(f"{what} ({folder}) can't hold files of {ROOM_BYTES >> 20} MiB: {why}") from error


def check_bucket(recipe: RecipeBase, site: str | None, *, new_run: bool, replaced: bool = False) -> None:
    """Probe the bucket as this site, where there is an outer loop; a folder in one beside it, which is gone after.

    Raises StoreUnusable, or BadInput when a new run would find another of its name there; FingerprintMismatch when the
    run that is there has other settings.
    """
    uri = run_uri(recipe)
    if uri is None or uri.startswith("memory://"):
        return
    probe = partial(probe_store, site=site)
    store = open_store(uri, recipe.site.key_file)
    try:
        if isinstance(store, FileStore):
            check_room("outer.store", store.root)
            standing = next(each for each in (store.root, *store.root.parents) if each.exists())
            with tempfile.TemporaryDirectory(prefix=".composer-prime-", dir=standing) as beside:
                probe(FileStore(beside))
        else:
            probe(store)
        if replaced:
            return  # what is there goes
        if new_run:
            check_new_run(recipe, store)
        elif store.list(keys.manifest()):
            manifest, terms = find_manifest(store)[0], terms_of(recipe)
            if change := changed_terms(manifest.terms, terms):
                raise FingerprintMismatch(
                    f"this recipe differs from the run {manifest.run!r} in the bucket: {change}. "
                    f"{another_run(manifest.run, uri)}"
                )
    finally:
        store.close()


def check_streams(recipe: Recipe, model_dir: Path) -> None:
    """Compare the recipe's teachers, hints' too, with the model's tokenizer. Raises TeacherRefused."""
    hinted = None if recipe.hints is None else recipe.hints.server
    if not recipe.replay.teachers and hinted is None:
        return
    import_tokenizers()
    tokenizer, top_k = load_tokenizer(model_dir), recipe.trainer.distill.top_k
    asyncio.run(_check(TeacherPool(recipe.replay.teachers, top_k), tokenizer))
    if hinted is not None:
        asyncio.run(_check(TeacherPool([hinted], top_k, table="hints"), tokenizer))


async def _check(pool: TeacherPool, tokenizer: Any) -> None:
    try:
        await pool.check(tokenizer)
    finally:
        await pool.close()


class ModelResolution:
    """A process that resolves the model while we do something else; `stop` it in any case."""

    def __init__(self, command: Sequence[str], paths: RunPaths) -> None:
        logs = paths.root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        descriptor, answer = tempfile.mkstemp(prefix="model-", suffix=".out", dir=logs)
        os.close(descriptor)
        self._answer = Path(answer)  # of its own: another site of this folder may start at this moment
        self._child = Child(
            "model", command, logs / "model.log", env=QUIET_ENV, stdout=self._answer, umask=users_umask()
        )

    def wait(self, interrupted: Callable[[], bool]) -> Path | None:
        """The local folder, once it is there; None when `interrupted` says so first.

        Raises BadInput with the process's own message, or ProcessCrashed with the end of its log.
        """
        while (code := self._child.poll()) is None:
            if interrupted():
                return None
            time.sleep(_POLL_S)
        if code in (BAD_INPUT_EXIT, SystemRefused.exit_code):
            raise bad_input(self._child, code)
        if code != 0:
            raise crashed(self._child, code)
        return Path(self._answer.read_text(encoding="utf-8").strip().splitlines()[-1])

    def stop(self) -> None:
        """End the process if it still runs, and forget its answer."""
        self._child.kill()
        self._answer.unlink(missing_ok=True)


def claim_ports(recipe: Recipe, sites: Sequence[str]) -> list[int]:
    """A port for each site's server. Raises BadInput when a fixed one is in use.

    A fixed inference.server.port is the first listed site's; the others, and then a joiner, take those after it.
    """
    taken: set[int] = set()
    first, names = recipe.inference.server.port, recipe.site_names
    places = [names.index(site) if site in names else len(names) for site in sites]
    return [claim_port(None if first is None else first + place, taken) for place in places]


def settle_sites(recipe: Recipe, sites: Sequence[str], model_dir: Path, resume: bool) -> list[SiteSettings]:
    """The settings of each site, on a port of its own. Raises BadInput when a fixed one is in use."""
    return [
        settle_site(recipe, site, inference_port=port, model_dir=model_dir, resume=resume)
        for site, port in zip(sites, claim_ports(recipe, sites), strict=True)
    ]
