"""Checks before anything starts: access to the model, GPU memory, traffic with the bucket, jobs and prices."""

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx

from composer_prime.config import PrimeRecipe, RecipeBase
from composer_prime.config.recipe import TINY_MODELS
from composer_prime.errors import BadInput, ComposerPrimeError, ModelError, Problems
from composer_prime.executors.base import gpu_kinds
from composer_prime.launch.budget import Limits, allowed_s, check_bounded
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.plan import AWS_SECRETS, LINKING, LaunchPlan, stored_logins
from composer_prime.launch.records import Launch, LaunchBook
from composer_prime.plan.memory import GIB, gpu_bytes, spared_by
from composer_prime.plan.prices import HOUR_S, egress_line, egress_usd_per_gb, gpu_gib, offered_gib
from composer_prime.plan.traffic import fragment_sizes
from composer_prime.sites.embedded.model import named_shapes
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.terms import terms_of

HUB = "https://huggingface.co"

Estimate = Callable[[RecipeBase], int]
"""Bytes that a site needs on all its GPUs together, 0 where it needs none; raises ModelError where that isn't known."""


class Unchecked(str):
    """A line on what can't be known beforehand: on a platform that bills, a reason not to begin."""


def access_lines(plan: LaunchPlan) -> Iterator[str]:
    """Asks the Hugging Face hub. Nothing for a model that the jobs may fetch, or that isn't the hub's; a line where it
    can't be known.

    Raises BadInput for a model that the hub doesn't give to the token that the jobs will have.
    """
    name = plan.recipe.model.name
    if name in TINY_MODELS or name.startswith(("/", ".", "~")) or Path(name).exists():
        return
    token = plan.secrets.reveal().get("HF_TOKEN")
    hub = plan.env.get("HF_ENDPOINT", HUB).rstrip("/")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        address = f"{hub}/api/models/{name}/auth-check"
        answer = httpx.get(address, headers=headers, timeout=10.0, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield Unchecked(f"access to {name}: not checked ({hub} doesn't answer: {type(error).__name__})")
        return
    if answer.status_code in (401, 403, 404):
        refusal = (
            f"model.name ({name}): {hub} answers {answer.status_code} {answer.headers.get('X-Error-Code', '')} to "
            f"{'HF_TOKEN' if token else 'no HF_TOKEN, which jobs get from this environment'}: correct the name, accept "
            f"its terms at {hub}/{name} where it is gated, or export the HF_TOKEN of an account that may read it"
        )
        if token is not None or not set(plan.platforms) <= {"local", "ssh"}:
            raise BadInput(refusal)
        yield f"access to {name}: not certain, since the machines may have the model or a login of their own: {refusal}"
    elif not answer.is_success:
        yield Unchecked(f"access to {name}: not checked ({hub} answers {answer.status_code})")


def login_lines(plan: LaunchPlan) -> Iterator[str]:
    """What jobs on a platform that bills would lack: logins stored on this machine, the credentials of the bucket."""
    if not plan.rented:
        return
    if "HF_TOKEN" not in plan.secrets and "HF_TOKEN" in stored_logins(["HF_TOKEN"]):
        yield "HF_TOKEN: what `hf auth login` stored stays here; --secret HF_TOKEN hands it over"
    if plan.run_uri.startswith(LINKING) and AWS_SECRETS[0] not in plan.secrets:
        asked = " ".join(f"--secret {name}" for name in stored_logins(AWS_SECRETS))
        why = f"those stored on this machine go along by {asked}" if asked else f"no {AWS_SECRETS[0]} is set, or stored"
        yield Unchecked(f"jobs get no credentials for {plan.run_uri}: {why}")


def memory_lines(plan: LaunchPlan, estimate: Estimate) -> Iterator[str]:
    """A site's need of GPU memory, and what it has on each platform by gpus.toml; one line before where nobody gives
    out the GPUs that are asked for.

    Raises BadInput when it has too little, with what would do. What isn't known is said to be unchecked.
    """
    own = " and ".join(name for name in plan.platforms if name in ("local", "ssh"))
    if own and plan.resources.gpu is not None:
        yield f"GPUs: launch.gpu is neither looked for nor given out on {own}: a site sees all GPUs of its machine"
    needed, unknown = 0, ""
    try:
        needed = estimate(plan.recipe)
    except (ComposerPrimeError, OSError) as error:
        unknown = str(error)
    if not needed and plan.resources.gpu is None and plan.recipe.needed_gpus and plan.rented:
        raise BadInput(f"a site needs {plan.recipe.needed_gpus} GPUs, and launch.gpu is not set: name one by --gpu")
    if unknown:
        yield Unchecked(f"GPU memory: not checked ({unknown})")
    if needed:
        yield from (_compared(plan, platform, needed) for platform in plan.platforms)


def _compared(plan: LaunchPlan, platform: str, needed: int) -> str:
    gpu, needs = plan.resources.gpu, f"about {needed / GIB:.0f} GiB"
    count = max(1, plan.resources.gpu_count)
    found, offers = gpu_gib(platform, gpu_kinds(plan.resources), count), offered_gib(platform)
    if not found and (gpu is not None or not offers):
        said = f"GPU memory: {needs} a site; not checked, since how much launch.gpu ({gpu}) has isn't known"
        return said if platform in ("local", "ssh") else Unchecked(said)
    has = f"{count} x {gpu} (launch.gpu) has {found}" if gpu else "launch.gpu is not set"
    if needed > found * GIB:
        fitting = [name for name in sorted(offers, key=offers.__getitem__) if offers[name] * GIB >= needed][:4]
        remedy = f"{', '.join(fitting)} would do" if fitting else "take more GPUs, or a smaller model"
        raise BadInput(f"{plan.recipe.model.name} needs {needs} of GPU memory a site, and {has}: {remedy}")
    return f"GPU memory: {needs} a site, and {has}"


def gpu_bytes_beforehand(recipe: RecipeBase) -> int:
    """GPU memory that a site needs at least; of a model on the Hub only the configuration is downloaded.

    Raises ModelError where that can't be had, and where the recipe spares memory in a way that nobody has measured.
    """
    if not isinstance(recipe, PrimeRecipe):
        return 0
    if (name := spared_by(recipe)) is not None:
        raise ModelError(f"{name} is set, and how much that spares isn't known")
    return gpu_bytes(recipe, sum(math.prod(shape) for _, shape in named_shapes(recipe.model.name)))


def bucket_lines(plan: LaunchPlan) -> Iterator[str]:
    """The cost of all that is fetched from the bucket; nothing for a folder, and of a smoke."""
    if plan.recipe.outer is None or plan.is_smoke or egress_usd_per_gb(plan.run_uri)[0] == 0:  # a folder
        return
    terms = terms_of(plan.recipe)
    try:
        sizes = fragment_sizes(terms, named_shapes(plan.recipe.model.name))
        yield egress_line(terms, sizes, max(2, len(plan.sites)), plan.run_uri) or ""
    except (ComposerPrimeError, OSError) as error:
        yield f"bucket traffic: not known beforehand ({error})"


def described(plan: LaunchPlan, limits: Limits, problems: Problems, *, dry_run: bool) -> Iterator[str]:
    """Line by line, what would be started and what that costs an hour, asked of the platforms without starting
    anything; what they would refuse is noted.

    dry_run   nothing will be: what installs packages is shown, too, and a missing login is no problem
    """
    costs: list[float | None] = []
    scripts: dict[str, list[str]] = {}
    book = LaunchBook(MemoryStore("dry-run"), Launch(number=1, name=f"{plan.recipe.run.name}-XXXXXXXX"))
    with closing(Fleet(book)) as fleet:
        for site in plan.sites:
            with problems.noted():
                on, spec = plan.places[site], fleet.spec(plan, site, 1)
                executor = fleet.executor(on)
                executor.check(spec)
                if not dry_run:
                    executor.log_in()
                price = fleet.price(plan, spec)
                check_bounded(limits, price, on)
                seconds = allowed_s(limits, [], price, wanted_s=plan.timeout_s, waiting=len(plan.sites), now=0.0)
                shown = executor.describe(replace(spec, timeout_s=max(1, seconds)))
                costs.append(price.usd_per_hour)
                scripts.setdefault(executor.script(spec), []).append(site)
                yield f"site {site} on {on}"
                yield from (f"  {line}" for line in shown.splitlines())
                usd = _usd(price.usd_per_hour)
                yield f"  price {usd} an hour ({price.source}); ends by itself after {seconds / HOUR_S:.2f} h"
    for script, sites in scripts.items():
        if script and dry_run:
            yield f"before the command of {', '.join(sites)}"
            yield from (f"  {line}" for line in script.splitlines())
    quorum, started = plan.recipe.outer.quorum if plan.recipe.outer else 1, len(plan.sites)
    if quorum > started and not plan.is_smoke:
        yield f"outer.quorum ({quorum}) is more than the {started} sites that start: no round closes until others join"
    total = None if None in costs else sum(each or 0.0 for each in costs)
    yield f"all {started} sites: {_usd(total)} an hour"
    yield f"run {plan.run_uri}; secrets from this environment: {', '.join(plan.secrets) or 'none'}"


def _usd(price: float | None) -> str:
    return "unknown" if price is None else f"${price:.2f}"
