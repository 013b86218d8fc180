"""From a recipe and the command's options to what a launch starts: its sites, their recipe, machine and secrets.

Everything that a person can mend is refused here, before anything is started or billed.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from composer_prime.config import PrimeRecipe, Recipe, RecipeBase, any_from_data, store_uri
from composer_prime.config.prime_rl import BUNDLED_TASKSETS
from composer_prime.config.recipe import module_of
from composer_prime.config.toml import to_toml
from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, Resources
from composer_prime.executors.installing import PRIME_RL_IMAGE, PRIME_RL_VERSION
from composer_prime.executors.open import absolute_option
from composer_prime.executors.packages import Packages, packages_of
from composer_prime.executors.secrets import Secrets
from composer_prime.launch.records import Intent, who
from composer_prime.redaction import SECRET_NAMES_VARIABLE
from composer_prime.store.keys import check_site_name
from composer_prime.sync.canonical import sha256_hex

DEFAULT_SECRETS = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)
"""Taken from the launcher's environment where they are set: gated models, metrics, the bucket."""
DEFAULT_ENV = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_REGION", "HF_ENDPOINT")
"""The same, of what is no secret."""
SECONDS_PER_HOUR = 3600
BY_LINKS = frozenset({"hf-jobs"})
"""Platforms whose jobs fetch the wheels that they install from the bucket."""
INSTALLS = BY_LINKS | {"modal"}
"""Platforms on which a job without an image installs what it needs; Modal keeps the result, as an image."""
LINKING = ("s3://", "hf://")
"""Buckets that give links to their objects."""
HF_IMAGE_VARIABLE = "COMPOSER_PRIME_HF_IMAGE"
"""The image of jobs on Hugging Face whose launch names none."""


@dataclass(frozen=True)
class LaunchPlan:
    """What one launch command wants.

    on        the platform, as `--on` names it
    recipe    as every replica runs it; paths of the bucket absolute
    run_uri   of the run in the bucket
    timeout_s of a job, where the budget doesn't make it shorter
    usd_per_hour   said by the person, where the platform doesn't know
    packages  what a job installs where no image is named and the platform can; None: nothing
    """

    on: str
    recipe: RecipeBase
    run_uri: str
    sites: tuple[str, ...]
    resources: Resources
    image: str | None
    registry_secret: str | None
    timeout_s: int
    caches: Mapping[str, str]
    env: Mapping[str, str]
    secrets: Secrets
    usd_per_hour: float | None = None
    packages: Packages | None = None

    @property
    def recipe_text(self) -> str:
        """The recipe as TOML, as it is stored in the bucket."""
        return to_toml(self.recipe.to_data())

    @property
    def recipe_sha(self) -> str:
        """The sha256 of `recipe_text`."""
        return sha256_hex(self.recipe_text.encode())

    @property
    def is_local(self) -> bool:
        return self.on == "local"

    @property
    def linked(self) -> Packages | None:
        """The packages, where jobs fetch them from the bucket."""
        return self.packages if self.on in BY_LINKS else None


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line says over the recipe's `[launch]` table; None: as there."""

    replicas: int | None = None
    sites: Sequence[str] = ()
    gpu: str | None = None
    gpu_count: int | None = None
    image: str | None = None
    timeout_hours: float | None = None
    usd_per_hour: float | None = None
    secrets: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


def plan_launch(recipe: RecipeBase, on: str, options: LaunchOptions) -> LaunchPlan:
    """What to start. Raises BadInput for a recipe that can't be launched there, and for secrets that aren't set."""
    on = absolute_option(on)
    sites = name_sites(recipe, options)
    recipe = _settled(recipe, sites, is_local=on == "local")
    store = _reachable_store(recipe, on)
    table = recipe.launch
    gpu = table.gpu if options.gpu is None else options.gpu
    count = (options.gpu_count or table.gpu_count) if gpu else 0
    hours = table.timeout_hours if options.timeout_hours is None else options.timeout_hours
    secrets = gather_secrets((*table.secrets, *options.secrets), options.environment)
    image = options.image or table.image or _default_image(on, options.environment)
    if table.registry_secret is not None and (on != "modal" or image is None):
        raise BadInput(
            f"launch.registry_secret ({table.registry_secret}) is for an image of yours on Modal: drop it, or name one"
        )
    packages = _packages(recipe, store) if image is None and on in INSTALLS else None
    if packages is not None and on in BY_LINKS and not store.startswith(LINKING):
        raise BadInput(
            f"outer.store ({store}) gives no links by which jobs on {on} could fetch {', '.join(packages.names)}: "
            "let it be s3://, or name an image that has them by --image"
        )
    return LaunchPlan(
        on=on,
        recipe=recipe,
        run_uri=f"{store}/{recipe.run.name}",
        sites=sites,
        resources=Resources(gpu, count, table.cpus, table.memory_gib, table.disk_gib),
        image=image,
        registry_secret=table.registry_secret,
        timeout_s=max(1, round(hours * SECONDS_PER_HOUR)),
        caches=dict(table.caches),
        env={name: options.environment[name] for name in DEFAULT_ENV if options.environment.get(name)},
        secrets=secrets,
        usd_per_hour=options.usd_per_hour,
        packages=packages,
    )


def _default_image(on: str, environment: Mapping[str, str]) -> str | None:
    return environment.get(HF_IMAGE_VARIABLE) if on == "hf-jobs" else None


def _packages(recipe: RecipeBase, store: str) -> Packages:
    """What a job of the recipe installs, on PRIME-RL's image beside what that brings."""
    needs = ["gcsfs"] if store.startswith("gs://") else []
    if isinstance(recipe, Recipe):
        return packages_of(
            [module_of(source.env.taskset.id) for source in recipe.orchestrator.train.source], needs=needs
        )
    assert isinstance(recipe, PrimeRecipe)
    if recipe.prime_rl.version not in ("auto", PRIME_RL_VERSION):
        raise BadInput(
            f"prime_rl.version ({recipe.prime_rl.version}) isn't that of the image that is taken where none is named, "
            f'{PRIME_RL_IMAGE}: set it to "{PRIME_RL_VERSION}", or name an image'
        )
    bundled = {*BUNDLED_TASKSETS, *(f"{name}-v1" for name in BUNDLED_TASKSETS)}
    modules = [module_of(each) for each in recipe.taskset_ids if each not in bundled]
    return packages_of(modules, needs=needs, on_prime_rl=True)


def name_sites(recipe: RecipeBase, options: LaunchOptions) -> tuple[str, ...]:
    """The names given, else r0, r1, ... for so many replicas, else the recipe's own."""
    names = tuple(options.sites)
    if names and options.replicas not in (None, len(names)):
        raise BadInput(
            f"--replicas ({options.replicas}) must be the number of --sites ({len(names)}): drop one of them"
        )
    if not names:
        names = recipe.site_names if options.replicas is None else tuple(f"r{n}" for n in range(options.replicas))
    for name in names:
        check_site_name(name)
        if "--" in name:
            raise BadInput(f"site {name} must not hold '--', which parts the names of jobs: choose another name")
    if len(set(names)) != len(names):
        raise BadInput(f"--sites ({', '.join(names)}) must differ: a site that runs twice would stop itself")
    return names


def gather_secrets(asked: Sequence[str], environment: Mapping[str, str]) -> Secrets:
    """The default secrets that are set, and those asked for. Raises BadInput for one asked for that isn't set."""
    missing = [name for name in asked if not environment.get(name)]
    if missing:
        raise BadInput(f"secret {missing[0]} isn't set in this environment: export {missing[0]}, or drop it")
    names = dict.fromkeys((*(name for name in DEFAULT_SECRETS if environment.get(name)), *asked))
    return Secrets({name: environment[name] for name in names})


def replica_command(plan: LaunchPlan, launch: int, site: str, attempt: int) -> tuple[str, ...]:
    """What a job runs: a replica that is told the run's place in the bucket, its launch, its name, its attempt, and by
    its sha256 the one recipe that it may run."""
    program = (sys.executable, "-m", "composer_prime.cli.main") if plan.is_local else ("composer-prime",)
    named = ("--launch", str(launch), "--site", site, "--attempt", str(attempt), "--recipe", plan.recipe_sha)
    return (*program, "replica", plan.run_uri, *named)


def planned_intent(plan: LaunchPlan, launch: int, site: str, attempt: int, timeout_s: int, now: float) -> Intent:
    """What the plan says of one attempt. Raises BadInput for what no record may hold."""
    try:
        return Intent(
            site=site,
            attempt=attempt,
            on=plan.on,
            recipe=plan.recipe_sha,
            command=replica_command(plan, launch, site, attempt),
            timeout_s=timeout_s,
            usd_per_hour=plan.usd_per_hour,
            resources=vars(plan.resources),
            image=plan.image,
            caches=dict(plan.caches),
            env=dict(plan.env),
            secrets=tuple(plan.secrets),
            created_at=now,
            created_by=who(),
        )
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise BadInput(f"{where} of this launch can't be recorded ({error.errors()[0]['msg']}): correct it") from error


def spec_of(intent: Intent, run: str, plan: LaunchPlan) -> JobSpec:
    """The job of an intent of this launcher's own making, with the secrets and the packages of its plan."""
    return JobSpec(
        run=run,
        site=intent.site,
        attempt=intent.attempt,
        command=intent.command,
        timeout_s=intent.timeout_s,
        env={**intent.env, SECRET_NAMES_VARIABLE: ",".join(intent.secrets)},
        secrets=plan.secrets,
        resources=intent.asks_for(),
        image=intent.image,
        registry_secret=plan.registry_secret,
        packages=plan.packages,
        caches=intent.caches,
    )


def other_than_planned(recorded: Intent, planned: Intent) -> str:
    """The first thing that a recorded intent says and the launcher doesn't plan, as a clause; "": there is none.

    A time-out may be shorter than planned, since the budget had less left then. A hosts file may have another path.
    """
    for name in ("on", "recipe", "command", "resources", "image", "caches", "env", "secrets"):
        here, there = _parts(name, planned), _parts(name, recorded)
        for part in here | there:
            if here.get(part) != there.get(part):
                return f"records {part} = {_shown(there.get(part))}, and this launch has {_shown(here.get(part))}"
    if recorded.timeout_s > planned.timeout_s:
        return f"records timeout_s = {recorded.timeout_s}, and this launch has at most {planned.timeout_s}"
    return ""


def _parts(name: str, intent: Intent) -> dict[str, Any]:
    value = getattr(intent, name)
    if name == "on":
        value = value.partition(":")[0]
    if isinstance(value, tuple):
        value = dict(enumerate(value))
    return {f"{name}.{part}": each for part, each in value.items()} if isinstance(value, dict) else {name: value}


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:200]


def _settled(recipe: RecipeBase, sites: Sequence[str], *, is_local: bool) -> RecipeBase:
    """The recipe as replicas run it: this machine's folders absolute, a shard for each of them, nothing deleted.

    A bucket that no recipe names is a folder beside the run's, which the sites find empty.
    """
    data: dict[str, Any] = recipe.to_data()
    if recipe.outer is None:
        raise BadInput(
            f"recipe of {recipe.run.name} has no [outer] table, so its sites could not meet: add one with outer.store"
        )
    unnamed = str((recipe.output_dir / "buckets").absolute())
    data["outer"]["store"] = unnamed if recipe.outer.store is None else store_uri(recipe)
    if is_local:
        data["output_dir"] = str(recipe.output_dir.absolute())
    overrides = data.setdefault("sites", {}).setdefault("overrides", {})
    if not set(sites) <= set(recipe.site_names):
        for place, site in enumerate(sites):
            overrides.setdefault(site, {}).setdefault("data_shard", place)
    data["clean"] = False
    return any_from_data(data)


def _reachable_store(recipe: RecipeBase, on: str) -> str:
    """The bucket. Raises BadInput when the recipe names files of this machine that a job elsewhere would not find."""
    store = store_uri(recipe)
    assert store is not None
    if on == "local":
        return store
    if "://" not in store or store.startswith(("file://", "memory://")):
        raise BadInput(
            f"outer.store ({recipe.outer.store if recipe.outer else None}) is on this machine, and jobs on {on} can't "
            "reach it: set outer.store to s3://, gs:// or hf://"
        )
    if Path(recipe.model.name).exists():
        raise BadInput(
            f"model.name ({recipe.model.name}) is a folder of this machine, which jobs on {on} don't have: "
            "name a Hugging Face model"
        )
    if recipe.site.key_file is not None:
        raise BadInput(
            f"site.key_file ({recipe.site.key_file}) is a file of this machine, which jobs on {on} don't have: "
            "launch runs without keys there, or start those sites with `composer-prime site`"
        )
    return store
