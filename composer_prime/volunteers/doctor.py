"""Whether this machine can take part: torch and its bits, memory, the link, beside what `plan` counts for the recipe.

One line a check, with what was found and what to do about it. A failed check says no; a warning says what will be slow.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from composer_prime.config.paths import run_uri
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.errors import ConfigError, EnvError, MachineUnfit, ModelError
from composer_prime.outer.fragments import NamedShape
from composer_prime.plan.memory import GIB, gpu_bytes, host_bytes, memory, share_gpus, spared_by
from composer_prime.plan.traffic import Link, Traffic, fragment_sizes, measure, seconds, traffic
from composer_prime.redaction import SECRET_NAMES_VARIABLE
from composer_prime.sites.embedded.installed import package_checks
from composer_prime.store import open_store, probe_store
from composer_prime.store.base import Store
from composer_prime.sync.protocol import GRACE_FLOOR_S
from composer_prime.sync.terms import Terms, terms_of
from composer_prime.volunteers.consent import Wishes, invited_recipe
from composer_prime.volunteers.entrance import Entrance, enter, own_key, reached
from composer_prime.volunteers.invitation import Invitation

JOIN_WARNED_S = 600.0
FAR_S = GRACE_FLOOR_S / 4
"""Of a small request: an offer takes some of them, and a round may wait no longer than the least grace for it."""
SMALL_NUMEL, MOST_THREADS = 5_000_000, 16
"""Below so many parameters a second thread costs more than it brings."""
TORCH_TIMEOUT_S = 120
"""Importing torch from a cold disk takes its time."""
ASK_TORCH = """\
import json, torch
from composer_prime.outer.arithmetic import test_vector
gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
gpus = [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus]
print(json.dumps({"version": torch.__version__, "test_vector": test_vector(), "gpus": gpus}))
"""
"""What a process of its own runs: a torch or driver that is broken ends in a line that says so, and not in a crash."""


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Torch:
    """What torch said of itself.

    test_vector   what the outer loop's arithmetic gives here, which must be what it gives at the other sites
    """

    version: str
    test_vector: str
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Machine:
    """One machine, as seen from this process.

    cores             that this process may use
    free_memory_bytes   that may be had now, without swapping. A container's limit counts
    torch             None: it can't be used, and `torch_problem` says why
    """

    python: str
    cores: int
    free_memory_bytes: int
    torch: Torch | None
    torch_problem: str = ""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those that torch can use."""
        return self.torch.gpus if self.torch else ()


def look() -> Machine:
    """This machine now. Takes a few seconds, most of them torch's."""
    torch, problem = ask_torch()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(platform.python_version(), cores, memory()[1], torch, problem)


def ask_torch() -> tuple[Torch | None, str]:
    """What torch says in a process of its own; None and the cause where that fails."""
    command = [sys.executable, "-c", ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"importing torch took more than {TORCH_TIMEOUT_S} s"
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return None, said[-1] if said else f"torch ended its process (exit code {done.returncode})"
    found = json.loads(done.stdout.splitlines()[-1])
    gpus = tuple(Gpu(**gpu) for gpu in found.pop("gpus"))
    return Torch(**found, gpus=gpus), ""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `remedy` is empty where there is nothing to do."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Task:
    """What the machine is checked for.

    shapes        of the model's trainable parameters
    num_sites     in the run, this one counted
    test_vector   what the run's arithmetic gives; None: there is no run yet
    """

    recipe: RecipeBase
    terms: Terms
    shapes: Sequence[NamedShape]
    num_sites: int = 2
    test_vector: str | None = None

    @property
    def sizes(self) -> list[int]:
        """Parameters of each fragment."""
        return fragment_sizes(self.terms, self.shapes)


@dataclass(frozen=True)
class Diagnosis:
    """All checks; the recipe as this machine would run it, where it can, and what was changed in it."""

    checks: tuple[Check, ...]
    recipe: RecipeBase | None = None
    fitted: tuple[str, ...] = ()
    traffic: Traffic | None = None

    @property
    def is_able(self) -> bool:
        """Whether nothing speaks against taking part."""
        return all(check.verdict != "fail" for check in self.checks)

    def refusal(self) -> MachineUnfit:
        """Why not, in one line."""
        failed = [check for check in self.checks if check.verdict == "fail"]
        found = "; ".join(f"{check.name}: {check.found}" for check in failed)
        remedies = "; ".join(check.remedy for check in failed if check.remedy)
        return MachineUnfit(f"this machine can't take part, thank you all the same: {found}. {remedies}".rstrip())


def examine(recipe: RecipeBase, entrance: Entrance, store: Store, wishes: Wishes) -> Diagnosis:
    """What this machine can do for a run."""
    shapes = [(parameter.name, parameter.shape) for parameter in entrance.manifest.parameters]
    task = Task(recipe, entrance.terms, shapes, entrance.num_sites, entrance.manifest.test_vector)
    link = replace(measure(store, entrance.site), up_cap=wishes.mbit_up, down_cap=wishes.mbit_down)
    return diagnose(look(), task, link)


def examine_for_invitation(invitation: Invitation, wishes: Wishes) -> Diagnosis:
    """What this machine can do for the run of an invitation, which is checked, too. Nothing is left behind."""
    with reached(invitation, wishes) as store:
        entrance = enter(invitation, store, own_key(invitation, wishes.key_file), starting=False)
        return examine(invited_recipe(invitation, wishes), entrance, store, wishes)


def examine_for_recipe(recipe: RecipeBase, wishes: Wishes) -> Diagnosis:
    """What this machine can do for a site of a recipe, whose run need not be there yet."""
    from composer_prime.sites.embedded.model import named_shapes

    task = Task(recipe, terms_of(recipe), named_shapes(recipe.model.name), recipe.sites.count + 1)
    uri, link = run_uri(recipe), None
    if uri is not None and recipe.outer is not None and recipe.outer.store is not None:
        up, down = wishes.mbit_up or recipe.site.max_mbit_up, wishes.mbit_down or recipe.site.max_mbit_down
        with closing(open_store(uri)) as store:
            link = replace(measure(store, recipe.site.name), up_cap=up, down_cap=down)
    return diagnose(look(), task, link)


def examine_job(recipe: RecipeBase, uri: str) -> Diagnosis:
    """What a launch's job finds on its machine, which may be smaller than a site's: packages, secrets, the bucket.

    Raises StoreUnusable.
    """
    with closing(open_store(uri)) as store:
        probe_store(store)
        link = measure(store)
    names = list(filter(None, os.environ.get(SECRET_NAMES_VARIABLE, "").split(",")))
    lost = [f"{name} isn't set" for name in names if not os.environ.get(name)]
    secrets = Check("secrets", "fail" if lost else "ok", ", ".join(lost or names) or "none")
    found = diagnose(look(), None, link)
    return replace(found, checks=(*found.checks, *installed_checks(recipe), secrets))


def diagnose(machine: Machine, task: Task | None = None, link: Link | None = None) -> Diagnosis:
    """Compare what there is with what is needed. `task` None: only the machine is looked at."""
    checks = list(torch_checks(machine, task))
    if task is None:
        return Diagnosis((*checks, *link_checks(link, None)))
    numel = sum(task.sizes)
    checks += [*installed_checks(task.recipe), memory_check(machine, task.recipe, task.terms, numel)]
    recipe, fitted = task.recipe, list[str]()
    if isinstance(recipe, Recipe):
        recipe, fitted = _with_threads(recipe, numel, machine.cores)
    elif isinstance(recipe, PrimeRecipe):
        try:
            if machine.gpus:
                recipe, fitted = share_gpus(recipe, numel, [gpu.memory_bytes for gpu in machine.gpus])
            checks.append(gpu_check(machine, recipe, gpu_bytes(task.recipe, numel)))
        except MachineUnfit as error:
            checks.append(Check("gpus", "fail", str(error)))
    moved = traffic(task.terms, task.sizes, task.num_sites)
    return Diagnosis((*checks, *link_checks(link, moved)), recipe, tuple(fitted), moved)


def _with_threads(recipe: Recipe, numel: int, cores: int) -> tuple[Recipe, list[str]]:
    """Half of the cores each to the trainer and the inference server, which work at the same time."""
    threads = 1 if numel < SMALL_NUMEL else max(1, min(MOST_THREADS, cores // 2))
    why = "the model is small" if numel < SMALL_NUMEL else f"{cores} cores, for two that compute"
    site = recipe.site.model_copy(update={"threads": threads})
    return recipe.model_copy(update={"site": site}), [f"site.threads {threads}: {why}"]


def torch_checks(machine: Machine, task: Task | None) -> Iterator[Check]:
    """Torch, and whether this machine computes what the others do."""
    if machine.torch is None:
        yield Check("torch", "fail", machine.torch_problem, "pip install torch, as pytorch.org says for this machine")
        return
    gpus = ", ".join(f"{gpu.name} with {gpu.memory_bytes / GIB:.0f} GiB" for gpu in machine.gpus)
    said = f"{machine.torch.version} on Python {machine.python}, {machine.cores} cores, GPUs: {gpus or 'none'}"
    yield Check("torch", "ok", said)
    if task is not None and task.test_vector is not None:
        same = machine.torch.test_vector == task.test_vector
        found = "bit for bit what the run computes" if same else "differs from the run's in its last bits"
        remedy = "" if same else "use the torch version and the kind of CPU that the other sites have"
        yield Check("arithmetic", "ok" if same else "fail", found, remedy)


def installed_checks(recipe: RecipeBase) -> Iterator[Check]:
    """Whether the model, PRIME-RL where it trains, and an embedded site's environments are to be had here."""
    name = recipe.model.name
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().exists():
        remedy = "ask the run's owner for a recipe that names a model of the hub, or put the folder there"
        yield Check("model", "fail", f"{name} is a folder that isn't here", remedy)
    if isinstance(recipe, PrimeRecipe):
        from composer_prime.sites.prime_rl.installation import find_installation

        try:
            found = find_installation(recipe.prime_rl)
            yield Check("prime-rl", "ok", f"{found.version}, started by {' '.join(found.command)}")
        except ConfigError as error:
            yield Check("prime-rl", "fail", str(error))
    if not isinstance(recipe, Recipe):
        return
    failed = []
    for check in package_checks(recipe):
        try:
            check()
        except (ModelError, EnvError, ConfigError) as error:
            failed.append(str(error))
    installed = ", ".join(source.env.taskset.id for source in recipe.orchestrator.train.source) or "none"
    yield Check("packages", "fail" if failed else "ok", "; ".join(failed) or f"environments: {installed}")


def memory_check(machine: Machine, recipe: RecipeBase, terms: Terms, numel: int) -> Check:
    """The machine's memory: what isn't known beforehand comes on top of what is needed."""
    needed = host_bytes(recipe, terms, numel)
    more = "forward passes" if isinstance(recipe, Recipe) else "PRIME-RL's own"
    said = f"at least {_gib(needed)} needed ({more} on top, unknown), {_gib(machine.free_memory_bytes)} free"
    enough = needed <= machine.free_memory_bytes
    remedy = "" if enough else "close other programs, or join from a larger machine"
    return Check("memory", "ok" if enough else "fail", said, remedy)


def gpu_check(machine: Machine, recipe: PrimeRecipe, needed: int) -> Check:
    """The memory of all GPUs together; less than is needed is no hindrance where the recipe spares some."""
    memory = sum(gpu.memory_bytes for gpu in machine.gpus)
    said = f"at least {_gib(needed)} needed, {_gib(memory) if machine.gpus else 'and torch sees no GPU'} here"
    spared = spared_by(recipe)
    if machine.gpus and needed > memory and spared is not None:
        return Check("gpu memory", "warn", f"{said}; but {spared} is set, and how much that spares isn't known")
    enough = bool(machine.gpus) and needed <= memory
    remedy = "" if enough else "join from a machine with more GPU memory"
    return Check("gpu memory", "ok" if enough else "fail", said, remedy)


def link_checks(link: Link | None, moved: Traffic | None) -> Iterator[Check]:
    """The way to the bucket: its speed, and what joining and a round take over it."""
    if link is not None:
        up, down = _rate(link.up_mbit, link.up_cap), _rate(link.down_mbit, link.down_cap)
        problem = f": {link.problem};" if link.problem else ","
        remedy = "the bucket is far away, or the way to it busy: each round takes several requests, one after another"
        said = f"up {up}{problem} down {down}, delay {1000 * link.delay_s:.0f} ms"
        is_far = link.delay_s > FAR_S
        yield Check("link", "warn" if is_far else "ok", said, remedy if is_far else "")
    if moved is None:
        return
    up_mbit = None if link is None else _least(link.up_mbit, link.up_cap)
    down_mbit = None if link is None else _least(link.down_mbit, link.down_cap)
    said = f"at most {moved.join_bytes / 1e6:.1f} MB"
    join_s = None if down_mbit is None else seconds(moved.join_bytes, down_mbit)
    slow = join_s is not None and join_s > JOIN_WARNED_S
    said += "" if join_s is None else f" in {join_s:.0f} s"
    yield Check("joining", "warn" if slow else "ok", said, "it takes long, once each time you start" if slow else "")
    said = f"{moved.up_bytes / 1e6:.2f} MB up and {moved.down_bytes / 1e6:.2f} MB down"
    if up_mbit is not None and down_mbit is not None:
        said += f", at least {seconds(moved.up_bytes, up_mbit) + seconds(moved.down_bytes, down_mbit):.1f} s"
    yield Check("a round", "ok", said)


def _least(mbit: float | None, cap: float | None) -> float | None:
    return mbit if mbit is None or cap is None else min(mbit, cap)


def _rate(mbit: float | None, cap: float | None) -> str:
    measured = "not measured" if mbit is None else f"{mbit:.1f} Mbit/s"
    return measured if cap is None else f"{measured} (capped at {cap:g} Mbit/s)"


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """The diagnosis as a person reads it."""
    for check in diagnosis.checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        yield f"{check.verdict:<4}  {check.name:<12} {check.found}{remedy}"
    yield from (f"      fitted       {reason}" for reason in diagnosis.fitted)


def to_json(diagnosis: Diagnosis) -> str:
    """The diagnosis for programs."""
    told = asdict(replace(diagnosis, recipe=None))
    del told["recipe"]
    return json.dumps({"able": diagnosis.is_able, **told}, indent=2)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
