"""From a recipe and the command's options to what a launch starts: its sites, their recipe, machine and secrets.

Everything that a person can mend is refused here, before anything is started or billed.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_prime.config import PrimeRecipe, Recipe, RecipeBase, any_from_data, store_uri
from composer_prime.config.prime_rl import BUNDLED_TASKSETS
from composer_prime.config.recipe import module_of
from composer_prime.config.toml import to_toml
from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, Resources
from composer_prime.executors.installing import PRIME_RL_IMAGE, PRIME_RL_VERSION
from composer_prime.executors.open import parse_on
from composer_prime.executors.packages import Packages, packages_of
from composer_prime.executors.secrets import Secrets
from composer_prime.launch.problems import Problems
from composer_prime.launch.records import Launch
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
class Placement:
    """Where a site's jobs run.

    on        the platform, as `--on` names it: "modal", "ssh:HOST"
    image     None: the platform's default
    packages  what a job installs where no image is named and the platform can; None: nothing
    """

    on: str
    image: str | None = None
    packages: Packages | None = None

    @property
    def platform(self) -> str:
        """Without a host."""
        return self.on.partition(":")[0]

    @property
    def linked(self) -> Packages | None:
        """The packages, where jobs fetch them from the bucket."""
        return self.packages if self.platform in BY_LINKS else None


@dataclass(frozen=True)
class LaunchPlan:
    """What one launch command wants; each job's machine is as the recipe's `[launch]` table says.

    places    by site
    recipe    as every replica runs it; paths of the bucket absolute
    run_uri   of the run in the bucket
    usd_per_hour   said by the person, where the platform doesn't know
    """

    places: Mapping[str, Placement]
    recipe: RecipeBase
    run_uri: str
    env: Mapping[str, str]
    secrets: Secrets
    usd_per_hour: float | None = None

    @property
    def resources(self) -> Resources:
        """Of each job."""
        table = self.recipe.launch
        sizes = (table.cpus, table.memory_gib, table.disk_gib, table.region, table.cloud, table.nonpreemptible)
        return Resources(table.gpu, table.gpu_count if table.gpu else 0, *sizes)

    @property
    def timeout_s(self) -> int:
        """Of a job, where the budget doesn't make it shorter."""
        return max(1, round(self.recipe.launch.timeout_hours * SECONDS_PER_HOUR))

    def spec(self, launch: Launch, site: str, attempt: int, timeout_s: int) -> JobSpec:
        """One attempt's job: a replica that is told the run's place in the bucket, its launch, its name, its attempt,
        and by its sha256 the one recipe that it may run."""
        program = (sys.executable, "-m", "composer_prime.cli.main") if self.is_local else ("composer-prime",)
        named = ("--launch", str(launch.number), "--site", site, "--attempt", str(attempt))
        return JobSpec(
            run=launch.name,
            site=site,
            attempt=attempt,
            command=(*program, "replica", self.run_uri, *named, "--recipe", self.recipe_sha),
            timeout_s=timeout_s,
            env={**self.env, SECRET_NAMES_VARIABLE: ",".join(self.secrets)},
            secrets=self.secrets,
            resources=self.resources,
            image=self.places[site].image,
            registry_secret=self.recipe.launch.registry_secret,
            packages=self.places[site].packages,
            caches=self.recipe.launch.caches,
        )

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.places)

    @property
    def platforms(self) -> tuple[str, ...]:
        """Each once, without hosts."""
        return tuple(dict.fromkeys(place.platform for place in self.places.values()))

    @property
    def one_of_each(self) -> tuple[str, ...]:
        """A site of each place: the others there are like it."""
        first: dict[str, str] = {}
        for site, place in self.places.items():
            first.setdefault(place.on, site)
        return tuple(first.values())

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
        return self.platforms == ("local",)


def plan_launch(
    recipe: RecipeBase,
    on: str,
    *,
    sites: Sequence[str] = (),
    replicas: int | None = None,
    secrets: Sequence[str] = (),
    usd_per_hour: float | None = None,
    environment: Mapping[str, str] = os.environ,
    problems: Problems | None = None,
) -> LaunchPlan:
    """What to start.

    sites, replicas   their names, or how many; neither: as `name_sites` has it
    secrets    names of variables of the environment, beside launch.secrets
    problems   takes what a person must mend, and a plan is returned nevertheless, for further checks; None: that is
               raised, as BadInput
    """
    found = Problems() if problems is None else problems
    parts = parse_on(on)
    named = found.get(lambda: name_sites(recipe, sites, replicas, parts), recipe.site_names)
    platforms = [name for name, count in parts for _ in range(len(named) if count is None else count)]
    recipe = _settled(recipe, named, is_local=parts[0][0] == "local")
    store = _store(recipe, platforms, found)
    default = {"hf-jobs": environment.get(HF_IMAGE_VARIABLE)}
    places = {
        site: _place(name, recipe, store, recipe.launch.image or default.get(name), found)
        for site, name in zip(named, platforms, strict=False)
    }
    private = recipe.launch.registry_secret
    if private is not None and not all(place.platform == "modal" and place.image for place in places.values()):
        with found.noted():
            raise BadInput(
                f"launch.registry_secret ({private}) is for an image of yours on Modal: drop it, or name one"
            )
    given = found.get(lambda: gather_secrets((*recipe.launch.secrets, *secrets), environment), Secrets())
    if problems is None:
        found.check()
    return LaunchPlan(
        places=places,
        recipe=recipe,
        run_uri=f"{store}/{recipe.run.name}",
        env={name: environment[name] for name in DEFAULT_ENV if environment.get(name)},
        secrets=given,
        usd_per_hour=usd_per_hour,
    )


def _place(on: str, recipe: RecipeBase, store: str, image: str | None, problems: Problems) -> Placement:
    place = Placement(on, image)
    if place.image is not None or on not in INSTALLS:
        return place
    place = replace(place, packages=problems.get(lambda: _packages(recipe, store), Packages(())))
    if place.linked is not None and not store.startswith(LINKING):
        with problems.noted():
            raise BadInput(
                f"outer.store ({store}) gives no links by which jobs on {on} could fetch their packages: let it be "
                "s3://, or name an image that has them by --image"
            )
    return place


def installed(recipe: RecipeBase, store: str, needs: Sequence[str]) -> Packages:
    """What a job installs that is no site of the recipe, but may start one: the same, not on PRIME-RL's image."""
    sites = _packages(recipe, store)
    ours = packages_of([], needs=[*needs, *_needs_of(store)])
    return replace(sites, pins=ours.pins, on_prime_rl=False)


def _needs_of(store: str) -> list[str]:
    return ["gcsfs"] if store.startswith("gs://") else []


def _packages(recipe: RecipeBase, store: str) -> Packages:
    """What a job of the recipe installs, on PRIME-RL's image beside what that brings."""
    needs = _needs_of(store)
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


def name_sites(
    recipe: RecipeBase, sites: Sequence[str], replicas: int | None, parts: Sequence[tuple[str, int | None]]
) -> tuple[str, ...]:
    """The names given; else r0, r1, ... for so many replicas, or as many as `--on` counts; else the recipe's own.

    parts   as `parse_on` gives them
    """
    names, wanted = tuple(sites), replicas
    if names and wanted not in (None, len(names)):
        raise BadInput(f"--replicas ({wanted}) must be the number of --sites ({len(names)}): drop one of them")
    counts = [count for _, count in parts if count is not None]
    if counts and (len(names) or wanted) not in (None, sum(counts)):
        said = f"--sites names {len(names)}" if names else f"--replicas is {wanted}"
        raise BadInput(f"--on counts {sum(counts)} sites, and {said}: let them be as many")
    wanted = sum(counts) if counts else wanted
    if not names:
        names = recipe.site_names
        if wanted is not None and (replicas is not None or wanted != len(names)):
            names = tuple(f"r{number}" for number in range(wanted))
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


def _store(recipe: RecipeBase, platforms: Iterable[str], problems: Problems) -> str:
    """The bucket. Notes what the recipe names of this machine that a job elsewhere would not find."""
    store = store_uri(recipe)
    assert store is not None
    there = ", ".join(dict.fromkeys(name.partition(":")[0] for name in platforms))
    if there == "local":
        return store
    wrong = []
    if "://" not in store or store.startswith(("file://", "memory://")):
        wrong.append(
            f"outer.store ({recipe.outer.store if recipe.outer else None}) is on this machine, and jobs on {there} "
            "can't reach it: set outer.store to s3://, gs:// or hf://"
        )
    if Path(recipe.model.name).exists():
        wrong.append(
            f"model.name ({recipe.model.name}) is a folder of this machine, which jobs on {there} don't have: "
            "name a Hugging Face model"
        )
    if recipe.site.key_file is not None:
        wrong.append(
            f"site.key_file ({recipe.site.key_file}) is a file of this machine, which jobs on {there} don't have: "
            "launch runs without keys there, or start those sites with `composer-prime site`"
        )
    for each in wrong:
        with problems.noted():
            raise BadInput(each)
    return store
