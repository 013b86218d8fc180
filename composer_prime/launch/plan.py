"""From a recipe and the command's options to what a launch starts: its sites, their recipe, machine and secrets.

Everything that a person can mend is refused here, before anything is started or billed.
"""

import os
import secrets as random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from composer_prime.config import PrimeRecipe, Recipe, RecipeBase, any_from_data, store_uri
from composer_prime.config.prime_rl import BUNDLED_TASKSETS
from composer_prime.config.recipe import MAKER, TINY_MODELS, module_of
from composer_prime.config.toml import to_toml
from composer_prime.errors import BadInput, ConfigError, Problems
from composer_prime.executors.base import JobSpec, Resources, Secrets
from composer_prime.executors.open import parse_on
from composer_prime.executors.packages import PRIME_RL_IMAGES, Packages, packages_of
from composer_prime.launch.records import Launch
from composer_prime.redaction import SECRET_NAMES_VARIABLE
from composer_prime.sites.embedded.installed import check_maker
from composer_prime.sites.prime_rl.toml import NEWER, SiteFiles, render
from composer_prime.store import keys
from composer_prime.store.keys import check_site_name
from composer_prime.sync.canonical import sha256_hex

AWS_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
DEFAULT_SECRETS = ("HF_TOKEN", "WANDB_API_KEY", *AWS_SECRETS)
"""Taken from the launcher's environment where they are set: gated models, metrics, the bucket."""
DEFAULT_ENV = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_REGION", "HF_ENDPOINT")
"""The same, of what is no secret."""
INSTALLS = ("modal", "hf-jobs", "sky")
"""Platforms on which a job without an image installs what it needs; Modal keeps the result, as an image."""
LINKED = ("hf-jobs", "sky")
"""Those whose jobs fetch their wheels from the bucket, by links."""
LINKING = ("s3://", "hf://")
"""Buckets that give links to their objects."""
SMOKE_S, SMOKE_MACHINE = 600, {"cpus": 1.0, "memory_gib": 4.0}
"""The most time that a smoke's job has, and its machine."""


_NAMES = PlainSerializer(list), PlainValidator(lambda names: Secrets({name: os.environ[name] for name in names}))
NamedSecrets = Annotated[Secrets, *_NAMES]
"""In JSON they are names; whoever reads that takes their values from its environment."""


@dataclass(frozen=True)
class LaunchPlan:
    """The wishes of one launch command; each job's machine is as the recipe's `[launch]` table says.

    places    by site the platform, as `--on` names it: "modal", "ssh:HOST"
    recipe    as every replica runs it; paths of the bucket absolute
    run_uri   of the run in the bucket
    packages  what a job installs where no image is named and its platform can; None: nothing
    usd_per_hour   said by the person, where the platform doesn't know
    is_smoke  whether a job only looks whether a site would find what it needs
    """

    places: Mapping[str, str]
    recipe: Annotated[RecipeBase, PlainSerializer(lambda recipe: recipe.to_data()), PlainValidator(any_from_data)]
    run_uri: str
    env: Mapping[str, str]
    secrets: NamedSecrets
    packages: Packages | None = None
    usd_per_hour: float | None = None
    is_smoke: bool = False

    @property
    def resources(self) -> Resources:
        """Of each job."""
        table = self.recipe.launch
        sizes = (table.cpus, table.memory_gib, table.disk_gib, table.region, table.cloud, table.nonpreemptible)
        count = table.gpu_count or max(1, self.recipe.needed_gpus)
        return Resources(table.gpu, count if table.gpu else 0, *sizes)

    @property
    def timeout_s(self) -> int:
        """Of a job, where the budget doesn't make it shorter."""
        return max(1, round(self.recipe.launch.timeout_hours * 3600))

    def spec(self, launch: Launch, site: str, attempt: int) -> JobSpec:
        """One attempt's job: a replica that is told the run's place in the bucket, its launch, its name, its attempt,
        and by its sha256 the one recipe that it may run."""
        here = (sys.executable, "-m", "composer_prime.cli.main")
        program = here if self.platforms == ("local",) else ("composer-prime",)
        named = ("--launch", str(launch.number), "--site", site, "--attempt", str(attempt))
        named += ("--recipe", sha256_hex(self.recipe_text.encode()), *["--smoke"] * self.is_smoke)
        packages = self.packages if self.places[site] in INSTALLS else None
        return JobSpec(
            run=launch.name,
            site=site,
            attempt=attempt,
            command=(*program, "replica", self.run_uri, *named),
            timeout_s=self.timeout_s,
            env={**self.env, SECRET_NAMES_VARIABLE: ",".join(self.secrets)},
            secrets=self.secrets,
            resources=self.resources,
            image=packages.image if packages else self.recipe.launch.image,
            registry_secret=self.recipe.launch.registry_secret,
            packages=packages,
            caches=self.recipe.launch.caches,
        )

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.places)

    @property
    def platforms(self) -> tuple[str, ...]:
        """Each once, without hosts."""
        return tuple(dict.fromkeys(on.partition(":")[0] for on in self.places.values()))

    @property
    def rented(self) -> tuple[str, ...]:
        """Those of the platforms that bill."""
        return tuple(name for name in self.platforms if name in INSTALLS)

    @property
    def recipe_text(self) -> str:
        """The recipe as TOML, as it is stored in the bucket, by its sha256."""
        return to_toml(self.recipe.to_data())


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
    """Plan what a command is to start.

    sites, replicas   as for `name_sites`
    secrets    names of variables of the environment, beside launch.secrets
    problems   takes what a person must mend, and a plan is returned for further checks; None: BadInput is raised
    """
    found = Problems() if problems is None else problems
    parts = parse_on(on)
    named, packages, given = recipe.declared_sites, None, Secrets()
    with found.noted():
        named = name_sites(recipe, sites, replicas, parts)
    platforms = [name for name, count in parts for _ in range(len(named) if count is None else count)]
    recipe = _settled(recipe, named, is_local=parts[0][0] == "local")
    store = _store(recipe, platforms, found)
    image, private = recipe.launch.image, recipe.launch.registry_secret
    with found.noted():
        prime_rl = _prime_rl_of(recipe)
        if image is None and not set(INSTALLS).isdisjoint(platforms):
            packages = installed(recipe, prime_rl=prime_rl)
    with found.noted():
        _check_machine(recipe, platforms)
    linked = [name for name in LINKED if name in platforms]
    if packages is not None and linked and not store.startswith(LINKING):
        found.note(
            f"outer.store ({store}) gives no links by which jobs on {linked[0]} could fetch their packages: let it be "
            "s3://, or name an image that has them by --image"
        )
    if private is not None and (image is None or set(platforms) != {"modal"}):
        found.note(f"launch.registry_secret ({private}) is for an image of yours on Modal: drop it, or name one")
    with found.noted():
        given = gather_secrets((*recipe.launch.secrets, *secrets), environment)
    if problems is None:
        found.check()
    return LaunchPlan(
        places=dict(zip(named, platforms, strict=False)),
        recipe=recipe,
        run_uri=f"{store}/{recipe.run.name}",
        env={name: environment[name] for name in DEFAULT_ENV if environment.get(name)},
        secrets=given,
        packages=packages,
        usd_per_hour=usd_per_hour,
    )


def smoke_plan(plan: LaunchPlan) -> LaunchPlan:
    """A launch of one small job on each platform and host of `plan`, in a folder of its own below the run's."""
    place, _, name = keys.probe(f"smoke-{random.token_hex(4)}").rpartition("/")
    data, store = plan.recipe.to_data(), f"{plan.run_uri}/{place}"
    kept = plan.recipe.launch.model_dump(include={"image", "registry_secret", "region", "cloud"}, exclude_none=True)
    data["launch"] = {**kept, **SMOKE_MACHINE, "timeout_hours": min(plan.timeout_s, SMOKE_S) / 3600}
    data["run"]["name"], data["outer"]["store"] = name, store
    places = {f"r{number}": on for number, on in enumerate(dict.fromkeys(plan.places.values()))}
    return replace(plan, places=places, recipe=any_from_data(data), run_uri=f"{store}/{name}", is_smoke=True)


def installed(recipe: RecipeBase, needs: Iterable[str] = (), *, prime_rl: str | None = None) -> Packages:
    """The packages of a site's job, or of one that may start sites. Raises as `packages_of`.

    needs     further packages from PyPI
    prime_rl  the version beside which they go; None: alone
    """
    monitors = recipe.monitors.model_dump(exclude_none=True) if isinstance(recipe, Recipe) else ()
    return packages_of(_modules(recipe), needs=[*needs, *monitors], prime_rl=prime_rl)


def _prime_rl_of(recipe: RecipeBase) -> str | None:
    """The PRIME-RL that jobs without an image take: the recipe's; where that is "auto", the newest that has an image of
    its own, or the newest of all where only this one can carry the recipe. None: another backend.

    Raises BadInput for a recipe that its version, or the newest, can't carry.
    """
    if not isinstance(recipe, PrimeRecipe):
        return None
    named, newest, files = recipe.prime_rl.version, NEWER, SiteFiles("any", Path("any"))
    version = list(PRIME_RL_IMAGES)[-1] if named == "auto" else named
    try:
        render(recipe, version, files)
    except ConfigError as lack:
        render(recipe, newest, files)  # what is wrong for all is said as it is
        if named != "auto":
            raise BadInput(f'{lack}: set prime_rl.version to "{newest}"') from None
        return newest
    return version


def _modules(recipe: RecipeBase) -> list[str]:
    """Of the environments that a recipe's jobs install, beside what PRIME-RL brings, and of what makes its model.

    Raises ModelError where that isn't here.
    """
    if isinstance(recipe, Recipe):
        check_maker(recipe.model.name)
        makers = [MAKER] if recipe.model.name in TINY_MODELS else []
        return [*(module_of(source.env.taskset.id) for source in recipe.orchestrator.train.source), *makers]
    assert isinstance(recipe, PrimeRecipe)
    bundled = {*BUNDLED_TASKSETS, *(f"{name}-v1" for name in BUNDLED_TASKSETS)}
    return [module_of(each) for each in recipe.taskset_ids if each not in bundled]


def name_sites(
    recipe: RecipeBase, sites: Sequence[str], replicas: int | None, parts: Sequence[tuple[str, int | None]]
) -> tuple[str, ...]:
    """The names given; else r0, r1, ... for so many replicas, or as many as `--on` counts; else the recipe's own.

    parts   as `parse_on` gives them
    """
    counts = {"--sites": len(sites), "--replicas": replicas, "--on": sum(count or 0 for _, count in parts)}
    said = {option: count for option, count in counts.items() if count}
    if len(set(said.values())) > 1:
        listed = ", and ".join(f"{option} says {count}" for option, count in said.items())
        raise BadInput(f"how many sites? {listed}: let them agree, or drop one")
    wanted, names = max(said.values(), default=0), tuple(sites) or recipe.declared_sites
    if not sites and (replicas or wanted not in (0, len(names))):
        names = tuple(f"r{number}" for number in range(wanted))
    for name in names:
        check_site_name(name)
        if "--" in name:
            raise BadInput(f"site {name} must not hold '--', which parts the names of jobs: choose another name")
    if len(set(names)) != len(names):
        raise BadInput(f"--sites ({', '.join(names)}) must differ: a site that runs twice would stop itself")
    return names


def _check_machine(recipe: RecipeBase, platforms: Sequence[str]) -> None:
    """Raise BadInput for a recipe whose site isn't one machine, or that asks for fewer GPUs than its site uses."""
    rented = next((name for name in INSTALLS if name in platforms), None)
    if rented is None:
        return
    if isinstance(recipe, PrimeRecipe):
        spread = recipe.upstream.get("slurm") is not None or recipe.upstream_value("deployment.type") == "multi_node"
        if spread:
            raise BadInput(
                f"[slurm] and [deployment] of {recipe.run.name} spread a site over several machines, and a job on "
                f"{rented} is one: take a recipe for a single node, or start its sites with `composer-prime site`"
            )
    count = recipe.launch.gpu_count
    if count is not None and count < recipe.needed_gpus:
        raise BadInput(
            f"launch.gpu_count ({count}) must be at least {recipe.needed_gpus}, the GPUs that [deployment] asks for: "
            "raise it, or drop it"
        )


def with_stored_logins(environment: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """The environment, and of the secrets that are asked for by name those that a login has stored on this machine."""
    return {**environment, **stored_logins([name for name in asked if not environment.get(name)])}


def stored_logins(names: Sequence[str]) -> dict[str, str]:
    """Of these variables the values that `hf auth login` and the AWS configuration have stored on this machine."""
    found: dict[str, str | None] = {}
    if "HF_TOKEN" in names:
        from huggingface_hub import get_token

        found["HF_TOKEN"] = get_token()
    if any(name in AWS_SECRETS for name in names) and find_spec("botocore") is not None:
        import botocore.session

        held = botocore.session.get_session().get_credentials()
        values = (held.access_key, held.secret_key, held.token) if held is not None else ()
        found |= zip(AWS_SECRETS, values, strict=False)
    return {name: value for name, value in found.items() if value and name in names}


def gather_secrets(asked: Sequence[str], environment: Mapping[str, str]) -> Secrets:
    """The default secrets that are set, and those asked for. Raises BadInput for one asked for that isn't set."""
    for name in asked:
        if not environment.get(name):
            raise BadInput(f"secret {name} isn't set in this environment: export {name}, or drop it")
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
    is_folder = "://" not in store or store.startswith(("file://", "memory://"))
    key, model = recipe.site.key_file, recipe.model.name
    keyless = "launch runs without keys there, or start those sites with `composer-prime site`"
    for is_here, what, remedy in (
        (is_folder, f"outer.store ({store})", "set outer.store to s3://, gs://, az:// or hf://"),
        (Path(model).exists(), f"model.name ({model})", "name a Hugging Face model"),
        (key is not None, f"site.key_file ({key})", keyless),
    ):
        if is_here:
            problems.note(f"{what} is on this machine, and jobs on {there} can't reach it: {remedy}")
    return store
