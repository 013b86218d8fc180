"""Whether this machine can take part: one line a check, with what was found, what is needed, and what to do about it.

What was found is `machine`'s and `link`'s, what is needed `needs`'; here both are compared. A failed check says no; a
warning says what will be slow or odd.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.errors import ConfigError, EnvError, MachineUnfit, ModelError
from composer_prime.outer.fragments import NamedShape
from composer_prime.sites.embedded.installed import check_installed, check_maker
from composer_prime.sync.protocol import GRACE_FLOOR_S
from composer_prime.sync.terms import Terms
from composer_prime.volunteers.fit import Fit, fit
from composer_prime.volunteers.fit_prime_rl import fit_prime_rl
from composer_prime.volunteers.link import Link
from composer_prime.volunteers.machine import Gpu, Machine
from composer_prime.volunteers.needs import Needs, model_of, needs_of, spared_by

Verdict = Literal["ok", "warn", "fail"]

PYTHONS = ((3, 11), (3, 13))
CLOCK_WARNED_S = 60.0
JOIN_WARNED_S = 600.0
FAR_S = GRACE_FLOOR_S / 4
"""Of a small request: an offer takes some of them, and a round may wait no longer than the least grace for it."""
GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `remedy` is empty where there is nothing to do."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Task:
    """What the machine is checked for.

    shapes        of the model's trainable parameters
    num_sites     in the run, this one counted
    test_vector   what the run's arithmetic gives; None: there is no run yet
    max_disk_bytes   that the volunteer lends; None: what is free
    keep_batch    whether the recipe's batch stays, since the site goes on with it
    """

    recipe: RecipeBase
    terms: Terms
    shapes: Sequence[NamedShape]
    num_sites: int = 2
    test_vector: str | None = None
    max_disk_bytes: int | None = None
    keep_batch: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """All checks, and the recipe as this machine would run it where it can."""

    checks: tuple[Check, ...]
    needs: Needs | None = None
    fit: Fit[Recipe] | Fit[PrimeRecipe] | None = None

    @property
    def is_able(self) -> bool:
        """Whether nothing speaks against taking part."""
        return all(check.verdict != "fail" for check in self.checks)

    def refusal(self) -> MachineUnfit:
        """Why not, in one line."""
        failed = "; ".join(f"{check.name}: {check.found}" for check in self.checks if check.verdict == "fail")
        remedies = "; ".join(check.remedy for check in self.checks if check.verdict == "fail" and check.remedy)
        return MachineUnfit(f"this machine can't take part, thank you all the same: {failed}. {remedies}".rstrip())


def diagnose(machine: Machine, task: Task | None, link: Link | None, clock_ahead_s: float | None) -> Diagnosis:
    """Compare what there is with what is needed. `task` None: only the machine is looked at."""
    checks = [*machine_checks(machine, task)]
    needs = found_fit = None
    if task is not None:
        checks += package_checks(task.recipe)
        try:
            found_fit = _fit(machine, task)
        except MachineUnfit as error:
            checks.append(Check("gpus" if isinstance(task.recipe, PrimeRecipe) else "memory", "fail", str(error)))
        recipe = task.recipe if found_fit is None else found_fit.recipe
        needs = needs_of(recipe, task.terms, task.shapes, task.num_sites)
        checks += need_checks(machine, task, needs, found_fit)
        checks += pace_checks(task, found_fit)
    checks += link_checks(link, needs, task)
    checks += clock_checks(clock_ahead_s)
    return Diagnosis(tuple(checks), needs, found_fit)


def _fit(machine: Machine, task: Task) -> Fit[Recipe] | Fit[PrimeRecipe] | None:
    """The recipe as this machine runs it; None without the GPUs that PRIME-RL needs. Raises MachineUnfit."""
    model = model_of(task.shapes)
    if isinstance(task.recipe, Recipe):
        return fit(task.recipe, task.terms, model, machine, keep_batch=task.keep_batch)
    if not gpus_of(machine) or not isinstance(task.recipe, PrimeRecipe):
        return None
    return fit_prime_rl(task.recipe, task.terms, model, gpus_of(machine), keep_batch=task.keep_batch)


def gpus_of(machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs that torch can use here."""
    return machine.torch.gpus if machine.torch else ()


def machine_checks(machine: Machine, task: Task | None) -> Iterator[Check]:
    """Python, torch, cores, and whether this machine computes what the others do."""
    version = sys.version_info[:2]
    is_known = PYTHONS[0] <= version <= PYTHONS[1]
    remedy = "" if is_known else "use Python 3.11, 3.12 or 3.13"
    yield Check("python", "ok" if is_known else "fail", machine.python, remedy)
    if machine.torch is None:
        yield Check("torch", "fail", machine.torch_problem, "pip install torch, as pytorch.org says for this machine")
        return
    yield Check("torch", "ok", f"{machine.torch.version}, {machine.torch.flops / 1e9:.0f} GFLOP/s a thread")
    gpus = ", ".join(f"{gpu.name} with {gpu.memory_bytes / GIB:.0f} GiB" for gpu in machine.torch.gpus)
    yield Check("gpu", "ok", gpus or "none that torch can use")
    yield Check("cores", "ok", str(machine.cores))
    if task is not None and task.test_vector is not None:
        same = machine.torch.test_vector == task.test_vector
        found = "bit for bit what the run computes" if same else "differs from the run's in its last bits"
        remedy = "" if same else "use the torch version and the kind of CPU that the other sites have"
        yield Check("arithmetic", "ok" if same else "fail", found, remedy)


def package_checks(recipe: RecipeBase) -> Iterator[Check]:
    """Whether the model, PRIME-RL where it trains, and an embedded site's environments are to be had here."""
    name = recipe.model.name
    folder = Path(name).expanduser()
    if name.startswith(("/", ".", "~")) and not folder.exists():
        remedy = "ask the run's owner for a recipe that names a model of the hub, or put the folder there"
        yield Check("model", "fail", f"{name} is a folder that isn't here", remedy)
    if isinstance(recipe, PrimeRecipe):
        yield prime_rl_check(recipe)
    if not isinstance(recipe, Recipe):
        return
    try:
        check_maker(name)
    except ModelError as error:
        yield Check("model", "fail", str(error))
    for source in recipe.orchestrator.train.source:
        try:
            check_installed(source.env.taskset.id)
            yield Check("environment", "ok", f"{source.env.taskset.id} is installed")
        except EnvError as error:
            yield Check("environment", "fail", str(error), "the run's owner knows from where")


def prime_rl_check(recipe: PrimeRecipe) -> Check:
    """Whether the PRIME-RL that would train is here, in a version whose keys we know."""
    from composer_prime.sites.prime_rl.installation import find_installation

    try:
        found = find_installation(recipe.prime_rl)
    except ConfigError as error:
        return Check("prime-rl", "fail", str(error))
    return Check("prime-rl", "ok", f"{found.version}, started by {' '.join(found.command)}")


def need_checks(machine: Machine, task: Task, needs: Needs, found: Fit[RecipeBase] | None) -> Iterator[Check]:
    """Memory, disk and GPUs."""
    if found is not None or not isinstance(task.recipe, Recipe):
        enough = needs.memory_bytes <= machine.free_memory_bytes
        said = f"{_gib(needs.memory_bytes)} needed, {_gib(machine.free_memory_bytes)} free"
        yield Check("memory", "ok" if enough else "fail", said, "" if enough else "close other programs")
    free = machine.free_disk_bytes if task.max_disk_bytes is None else min(machine.free_disk_bytes, task.max_disk_bytes)
    enough = needs.disk_bytes <= free
    lent = "" if task.max_disk_bytes is None else f", {_gib(task.max_disk_bytes)} lent"
    remedy = "" if enough else "free some space, choose another --folder, or lend more with --max-disk-gib"
    said = f"{_gib(needs.disk_bytes)} needed, {_gib(machine.free_disk_bytes)} free{lent}"
    yield Check("disk", "ok" if enough else "fail", said, remedy)
    if isinstance(task.recipe, PrimeRecipe) and (found is not None or not gpus_of(machine)):
        yield gpu_check(machine, task.recipe, needs)


def gpu_check(machine: Machine, recipe: PrimeRecipe, needs: Needs) -> Check:
    """The memory of all GPUs together; less than is needed is no hindrance where the recipe spares some."""
    gpus = gpus_of(machine)
    memory = sum(gpu.memory_bytes for gpu in gpus)
    said = f"{_gib(needs.gpu_bytes)} needed, " + (f"{_gib(memory)} there" if gpus else "and torch sees no GPU here")
    spared = spared_by(recipe)
    if gpus and needs.gpu_bytes > memory and spared is not None:
        return Check("gpu memory", "warn", f"{said}; but {spared} is set, and how much that spares isn't known")
    enough = bool(gpus) and needs.gpu_bytes <= memory
    return Check(
        "gpu memory", "ok" if enough else "fail", said, "" if enough else "join from a machine with more GPU memory"
    )


def pace_checks(task: Task, found: Fit[RecipeBase] | None) -> Iterator[Check]:
    """How many inner steps lie between two offers here, or how long theirs take, which all sites share."""
    terms, wait_s = task.terms, f"{task.terms.grace_s:g} s (outer.grace_s)"
    if isinstance(task.recipe, PrimeRecipe):
        said = "how long a step takes here isn't known before it trains; each GPU counts as much as the recipe's"
        if terms.pace == "seconds":
            yield Check("pace", "ok", f"{said}; you make as many as there is time for")
        else:
            remedy = f"who is behind is waited for {wait_s} at most, then the others go on"
            yield Check("pace", "warn", said, remedy)
    if found is None or found.step_s is None:
        return
    if terms.pace == "seconds":
        steps = max(1, round(terms.seconds_per_turn / found.step_s))
        # An upper bound, far above what a small model's site makes: arithmetic alone, without waiting and Python.
        said = f"at most {steps} inner {'step' if steps == 1 else 'steps'} between offers, which the run makes every"
        yield Check("pace", "ok", f"{said} {terms.seconds_per_turn:g} s")
        return
    steps, turn_s = terms.steps_per_turn, terms.steps_per_turn * found.step_s
    said = f"{steps} inner {'step' if steps == 1 else 'steps'} between offers, about {turn_s:.1f} s here"
    if turn_s <= terms.grace_s:
        yield Check("pace", "ok", said)
        return
    remedy = (
        "unless the others are as slow your offers come late, into later rounds: the run's owner mends that by a run "
        'with outer.pace = "seconds", in which each site makes as many steps as it can'
    )
    yield Check("pace", "warn", f"{said}; for who is behind, the others wait at most {wait_s}", remedy)


def link_checks(link: Link | None, needs: Needs | None, task: Task | None) -> Iterator[Check]:
    """The way to the bucket: its speed, and what joining and a round take over it."""
    if link is None:
        return
    up, down = _rate(link.up_mbit, link.up_cap), _rate(link.down_mbit, link.down_cap)
    problem = f": {link.problem};" if link.problem else ","
    is_far = link.delay_s > FAR_S
    remedy = "the bucket is far away, or the way to it busy: each round takes several requests, one after another"
    said = f"up {up}{problem} down {down}, delay {1000 * link.delay_s:.0f} ms"
    yield Check("link", "warn" if is_far else "ok", said, remedy if is_far else "")
    if needs is None or task is None:
        return
    up_mbit, down_mbit = link.usable
    if down_mbit is not None:
        join_s = 8 * needs.join_bytes / down_mbit / 1e6
        said = f"{needs.join_bytes / 1e6:.1f} MB in about {join_s:.0f} s"
        if join_s > task.recipe.site.exact_join_s:
            begin_s = join_s * needs.begin_bytes / needs.join_bytes
            said += f"; training begins after {needs.begin_bytes / 1e6:.1f} MB, about {begin_s:.0f} s"
        slow = join_s > JOIN_WARNED_S
        yield Check(
            "joining", "warn" if slow else "ok", said, "it takes long, once each time you start" if slow else ""
        )
    moved = f"{needs.up_bytes / 1e6:.2f} MB up and {needs.down_bytes / 1e6:.2f} MB down"
    if up_mbit is None or down_mbit is None:
        yield Check("a round", "ok", moved)
        return
    round_s = 8 * (needs.up_bytes / up_mbit + needs.down_bytes / down_mbit) / 1e6
    is_slow = task.terms.pace == "seconds" and round_s > task.terms.inner_seconds
    remedy = "slower than the run's rounds: some of your work goes into later ones" if is_slow else ""
    yield Check("a round", "warn" if is_slow else "ok", f"{moved} in about {round_s:.1f} s", remedy)


def _rate(mbit: float | None, cap: float | None) -> str:
    measured = "not measured" if mbit is None else f"{mbit:.1f} Mbit/s"
    return measured if cap is None else f"{measured} (capped at {cap:g} Mbit/s)"


def clock_checks(ahead_s: float | None) -> Iterator[Check]:
    """The clock: the protocol never looks at it, but requests are signed with the time."""
    if ahead_s is None:
        return
    way = "ahead of" if ahead_s >= 0 else "behind"
    off = abs(ahead_s) > CLOCK_WARNED_S
    remedy = "set it: stores and gateways refuse requests more than 5 to 15 minutes off" if off else ""
    yield Check("clock", "warn" if off else "ok", f"{abs(ahead_s):.0f} s {way} the bucket's", remedy)


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """The diagnosis as a person reads it."""
    for check in diagnosis.checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        yield f"{check.verdict:<4}  {check.name:<12} {check.found}{remedy}"
    if diagnosis.fit is not None:
        for reason in diagnosis.fit.reasons:
            yield f"      fitted       {reason}"


def to_json(diagnosis: Diagnosis) -> str:
    """The diagnosis for programs."""
    fit = diagnosis.fit
    found = {
        "able": diagnosis.is_able,
        "checks": [asdict(check) for check in diagnosis.checks],
        "needs": None if diagnosis.needs is None else asdict(diagnosis.needs),
        "fitted": None if fit is None else {"reasons": fit.reasons, "step_s": fit.step_s},
    }
    return json.dumps(found, indent=2)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
