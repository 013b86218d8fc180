"""What an invitation asks of the volunteer, and their word for it: packages that run here, and who else sees prompts.

Nothing here imports what an invitation names: what is installed is read from the packages' own records.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import TINY_MODELS, Recipe, RecipeBase
from composer_prime.errors import InvitationRefused
from composer_prime.volunteers.invitation import Invitation
from composer_prime.volunteers.shared_recipe import read_shared

HARMLESS = ("chat", "null")
"""Harnesses without a shell: what the model says reaches the tools of the environment alone."""
LOCAL_RUNTIME = "subprocess"
DEFAULT_HARNESS, DEFAULT_RUNTIME = "bash", "prime"
"""verifiers' own, where a PRIME-RL recipe names none."""
GIB = 2**30
_VERIFIERS = re.compile(r"verifiers(?![A-Za-z0-9._-])", re.IGNORECASE)

Ask = Callable[[str], str]
"""Puts a question to the volunteer; what they typed."""


@dataclass(frozen=True)
class Wishes:
    """What the volunteer asks for; None: no limit.

    folder                 None: ~/composer-prime/RUN
    key_file               of a key that the volunteer made
    mbit_up, mbit_down     Mbit/s that the site may use
    hours                  after which it leaves
    niceness               from 0 to 19: how far it steps back for other programs
    allow_envs, allow_harnesses, allow_teachers   packages and servers, by name, that an invitation may choose
    allow_local            whether it may lead to a folder or an address of this machine or its network
    use_my_aws             whether requests to the bucket are signed by what this machine's user has
    """

    folder: Path | None = None
    key_file: Path | None = None
    mbit_up: float | None = None
    mbit_down: float | None = None
    max_disk_gib: float | None = None
    hours: float | None = None
    niceness: int = 0
    allow_envs: Sequence[str] = ()
    allow_harnesses: Sequence[str] = ()
    allow_teachers: Sequence[str] = ()
    allow_local: bool = False
    use_my_aws: bool = False

    @property
    def max_disk_bytes(self) -> int | None:
        """What the site may put on the disk."""
        return None if self.max_disk_gib is None else int(self.max_disk_gib * GIB)


@dataclass(frozen=True)
class Asked:
    """What a recipe asks of a volunteer.

    environments   packages that play rollouts
    harnesses      that let a model run commands; and runtimes that aren't on this machine
    teachers       URLs that are sent prompts and answers
    names          texts that would be taken for a file or folder where one of that name is
    """

    environments: tuple[str, ...]
    harnesses: tuple[str, ...]
    teachers: tuple[str, ...]
    names: tuple[str, ...]


def invited_recipe(invitation: Invitation, wishes: Wishes, *, asks: bool = False) -> RecipeBase:
    """The invitation's recipe, which holds nothing but what may be held and what the volunteer allows.

    asks   environments are asked for later (`confirm_environments`), since somebody is there to answer

    Raises InvitationRefused in one line, ConfigError for what is no recipe. Nothing it names was imported or opened.
    """
    recipe = read_shared(invitation.recipe)
    if recipe.run.name != invitation.run:
        raise InvitationRefused(
            f"the invitation is to run {invitation.run}, and its recipe to {recipe.run.name}: ask for another one"
        )
    asked = asked_of(recipe)
    _check_names(asked.names)
    for teacher in _missing(asked.teachers, wishes.allow_teachers):
        raise InvitationRefused(
            f"the invitation's recipe sends prompts and answers to the teacher at {teacher}: add --allow-teacher "
            f"{teacher} if whoever runs it may see them"
        )
    for name in _missing(asked.harnesses, wishes.allow_harnesses):
        raise InvitationRefused(
            f"the invitation's recipe plays rollouts with {name}, where a model runs commands: add --allow-harness "
            f"{name} if it may, on this machine or in sandboxes of your account"
        )
    for name in () if asks else _missing(asked.environments, wishes.allow_envs):
        raise _not_allowed(name)
    if isinstance(recipe, Recipe):
        for name in asked.environments:
            _check_package(name)
    return recipe


def confirm_environments(recipe: RecipeBase, wishes: Wishes, ask: Ask) -> None:
    """Ask for each environment that --allow-env doesn't name; its name is the answer. Raises InvitationRefused."""
    for name in _missing(asked_of(recipe).environments, wishes.allow_envs):
        if ask(f"Environment {name} and its tools run with your rights. Type its name to let them").strip() != name:
            raise _not_allowed(name)


def asked_of(recipe: RecipeBase) -> Asked:
    """What an invited recipe asks."""
    teachers: Sequence[str] = ()
    if isinstance(recipe, PrimeRecipe):
        sources = recipe.upstream_value("orchestrator.train.source", [])
    else:
        assert isinstance(recipe, Recipe)
        sources = [source.model_dump() for source in recipe.orchestrator.train.source]
        teachers = [teacher.base_url for teacher in recipe.replay.teachers]
        hinted = None if recipe.hints is None else recipe.hints.base_url
        teachers += [] if hinted is None else [hinted]
    environments, harnesses, names = [], [], [] if recipe.model.name in TINY_MODELS else [recipe.model.name]
    for source in sources:
        taskset, agent = _at(source, "env", "taskset"), _at(source, "env", "agent")
        environments += [taskset["id"]] if "id" in taskset else []
        harness = _at(agent, "harness").get("id", DEFAULT_HARNESS)
        runtime = _at(agent, "runtime").get("type", DEFAULT_RUNTIME)
        harnesses += [harness] if harness not in HARMLESS else []
        harnesses += [runtime] if runtime != LOCAL_RUNTIME else []
        names += [value for key, value in taskset.items() if key != "id" and isinstance(value, str)]
    return Asked(*(tuple(dict.fromkeys(found)) for found in (environments, harnesses, teachers, names)))


def _at(table: dict[str, Any], *path: str) -> dict[str, Any]:
    for name in path:
        table = table.get(name, {})
    return table


def _missing(asked: Sequence[str], allowed: Sequence[str]) -> Iterator[str]:
    yield from (name for name in asked if name not in allowed)


def _not_allowed(name: str) -> InvitationRefused:
    return InvitationRefused(
        f"the invitation's recipe runs the environment {name} with your rights: add --allow-env {name} if you "
        "installed it from someone you trust"
    )


def _check_names(names: Sequence[str]) -> None:
    """Hub ids win over folders nowhere: transformers takes a folder of that name first, and so do environments."""
    for name in names:
        if Path(name).exists():
            raise InvitationRefused(
                f"the invitation's recipe names {name}, which is a file or folder here too, and could be taken for it: "
                "run the command from another folder, such as an empty one"
            )


def _check_package(name: str) -> None:
    """Raise InvitationRefused where a module of that name is here that is no verifiers environment.

    One that isn't here at all is the doctor's to name.
    """
    try:
        requirements = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            return
        requirements = []
    if not any(_VERIFIERS.match(requirement) for requirement in requirements):
        raise InvitationRefused(
            f"the invitation's recipe names {name} as an environment, and what is installed of that name is none (it "
            "doesn't require verifiers): ask the run's owner which package is meant"
        )
