"""`composer-prime join`: from an invitation to a site that trains, comes, goes, and comes back.

Checks first, all of them; then the machine, then what is fitted to it and who will see what; only then does anything
start. The site itself is the same as any other's, and knows nothing of volunteers: beside it a thread watches for what
the volunteer asked, and ends it as Ctrl-C would, which lets the trainer save and say goodbye.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from composer_prime.config.paths import RunPaths
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import RecipeBase
from composer_prime.errors import ConfigError, MachineUnfit
from composer_prime.gateway.store import KEY_VARIABLE
from composer_prime.sites.embedded.processes import catch_interrupt
from composer_prime.volunteers.consent import GIB, Ask, Wishes, asked_of, confirm_environments, invited_recipe
from composer_prime.volunteers.doctor import examine, lines
from composer_prime.volunteers.entrance import Entrance, enter, own_key, reached
from composer_prime.volunteers.folder import VolunteerFolder, elsewhere, kept_below
from composer_prime.volunteers.invitation import Invitation

INTERRUPTED_EXIT = 130
LOOK_S = 0.5
DISK_LOOK_S = 30.0

Say = Callable[[str], None]
RunSite = Callable[[Any, str, bool], int]


def folder_of(invitation: Invitation, folder: Path | None) -> VolunteerFolder:
    """Where the invited site lives on this machine."""
    root = Path.home() / "composer-prime" / invitation.run if folder is None else folder.expanduser()
    return VolunteerFolder(root.absolute(), invitation.site)


def join(
    invitation: Invitation,
    wishes: Wishes,
    say: Say = print,
    run_site: RunSite | None = None,
    ask: Ask | None = None,
) -> int:
    """Take part until the run ends, the volunteer leaves, or the hours are over; the exit code.

    run_site   what trains a site; None: `site_runner`'s
    ask        whom to ask for environments that `wishes` doesn't allow; None: nobody, and they are refused

    Raises BadInput in one line where the invitation doesn't hold or the machine can't do it; nothing has started then.
    """
    folder = folder_of(invitation, wishes.folder)
    with folder.held():
        recipe = prepare(invitation, wishes, folder, say, ask)
        if recipe is not None:
            os.nice(wishes.niceness)
            with kept_below(folder.root):  # before anything is imported that reads where the hub's files go
                code = _take_part(recipe, invitation.site, folder, wishes, say, run_site or site_runner(recipe))
            if code is not None:
                return code
        say(f"run {invitation.run} is finished")
        return 0


def prepare(
    invitation: Invitation, wishes: Wishes, folder: VolunteerFolder, say: Say, ask: Ask | None = None
) -> RecipeBase | None:
    """All that comes before the start; the recipe as this machine runs it, None when the run has ended."""
    with reached(invitation, wishes) as store:
        key = own_key(invitation, wishes.key_file)
        entrance = enter(invitation, store, key)
        if entrance.is_finished:
            return None
        recipe = localized(invitation, wishes, folder, entrance, asks=ask is not None)
        say(f"run {invitation.run} at {invitation.uri}: checking this machine")
        diagnosis = examine(recipe, entrance, store, wishes)
    for line in lines(diagnosis):
        say(line)
    if not diagnosis.is_able:
        raise diagnosis.refusal()
    for line in disclosure(invitation, entrance, recipe, folder):
        say(line)
    if ask is not None:
        confirm_environments(recipe, wishes, ask)
    os.environ[KEY_VARIABLE] = str(folder.keep_key(key))
    return diagnosis.recipe


def localized(
    invitation: Invitation, wishes: Wishes, folder: VolunteerFolder, entrance: Entrance, *, asks: bool = False
) -> RecipeBase:
    """The recipe with what is this machine's: its folder, its site's name and key, its limits. Raises as it is read."""
    recipe = invited_recipe(invitation, wishes, asks=asks)
    if recipe.outer is None:
        raise ConfigError("the invitation's recipe has no [outer] table, so there is no run to join: ask for another")
    store = invitation.uri.removesuffix(f"/{invitation.run}")
    outer = recipe.outer.model_copy(update={"store": store, "owner": entrance.manifest.owner})
    site = recipe.site.model_copy(
        update={
            "name": invitation.site,
            "key_file": folder.key_file,
            "max_mbit_up": wishes.mbit_up,
            "max_mbit_down": wishes.mbit_down,
        }
    )
    return recipe.model_copy(update={"output_dir": folder.root, "outer": outer, "site": site})


def disclosure(
    invitation: Invitation, entrance: Entrance, recipe: RecipeBase, folder: VolunteerFolder
) -> Iterator[str]:
    """Who sees what, and what runs here, for the volunteer to know before it starts."""
    numel = sum(math.prod(parameter.shape) for parameter in entrance.manifest.parameters)
    yield f"You take part as site {invitation.site} in run {invitation.run}, whose owner is {entrance.manifest.owner}."
    if invitation.guest:
        yield "You are a guest: your work is merged within a guest's limits, and the owner's sites close the rounds."
    yield f"Weights: all {numel:,} parameters come to this machine, into {folder.root}, which is yours to delete."
    if (place := elsewhere(folder.root)) is not None:
        yield place
    yield (
        "Prompts and answers stay on this machine. Whoever reads the bucket sees what your training changed in the "
        "weights, how many tokens it took, your site's name, this machine's host name, and when you were there."
    )
    asked = asked_of(recipe)
    for teacher in asked.teachers:
        yield f"But a teacher is asked about them, so whoever runs {teacher} sees prompts and answers."
    prime_rl = "PRIME-RL; " if isinstance(recipe, PrimeRecipe) else ""
    commands = f"; and what a model says to {', '.join(asked.harnesses)}" if asked.harnesses else ""
    environments = ", ".join(asked.environments) or "none"
    yield f"Code that runs here: {prime_rl}environments {environments}{commands}. The model is {recipe.model.name}."
    yield "Ctrl-C leaves, and the same command brings you back. From another terminal --pause and --resume do the same."


def site_runner(recipe: RecipeBase) -> RunSite:
    """What trains a site of this recipe, given recipe, name, and whether to go on from its folder; imported now."""
    if isinstance(recipe, PrimeRecipe):
        from composer_prime.sites.prime_rl.launch import run_site as run_prime_rl

        return lambda recipe, site, resume: run_prime_rl(recipe, site, resume, continuing=None)
    from composer_prime.sites.embedded.local_run import Surroundings, joining_model_command, run_site

    surroundings = Surroundings(continuing=None, model_command=joining_model_command)
    return lambda recipe, site, resume: run_site(recipe, site, resume, surroundings)


class Reason(Enum):
    """Why the warden ended the site."""

    PAUSED = "paused"
    TIME = "the hours you gave are over"
    DISK = "the disk you lent is full"


class Warden:
    """A thread beside one site, from `with` to its end, which ends the site when the volunteer wants it to, once.

    until   on the monotonic clock
    """

    def __init__(
        self,
        folder: VolunteerFolder,
        *,
        until: float = math.inf,
        max_disk_bytes: int | None = None,
        end: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        self._folder = folder
        self._until = until
        self._max_disk_bytes = max_disk_bytes
        self._end = end
        self._handler_before = signal.getsignal(signal.SIGTERM)
        self._stopped = threading.Event()
        self._disk_looked_at = -math.inf
        self._thread = threading.Thread(target=self._run, name="warden", daemon=True)
        self.reason: Reason | None = None
        """Why the site was ended; None: it wasn't, by us."""

    def __enter__(self) -> "Warden":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            # Before the site has put its own handler in place nobody would hear the signal, and after it neither.
            is_heard = signal.getsignal(signal.SIGTERM) != self._handler_before
            if is_heard and (reason := self._look()) is not None:
                self.reason = reason
                self._end()
                return

    def _look(self) -> Reason | None:
        if time.monotonic() >= self._until:
            return Reason.TIME
        if self._folder.is_paused:
            return Reason.PAUSED
        if self._max_disk_bytes is not None and time.monotonic() - self._disk_looked_at >= DISK_LOOK_S:
            self._disk_looked_at = time.monotonic()
            if self._folder.used_bytes() > self._max_disk_bytes:
                return Reason.DISK
        return None


def _take_part(
    recipe: RecipeBase, site: str, folder: VolunteerFolder, wishes: Wishes, say: Say, run_site: RunSite
) -> int | None:
    """The exit code; None when the site has trained to the run's end."""
    until = math.inf if wishes.hours is None else time.monotonic() + 3600 * wishes.hours
    with catch_interrupt() as interrupt:
        while True:
            if folder.is_paused:
                say("paused: nothing runs, and nobody waits for this site; --resume goes on")
            while folder.is_paused and not interrupt.is_set and time.monotonic() < until:
                time.sleep(LOOK_S)
            if interrupt.is_set:
                say("left: run the same command to come back")
                return INTERRUPTED_EXIT
            if time.monotonic() >= until:
                say(f"left: {Reason.TIME.value}")
                return 0
            resume = RunPaths.of(recipe).site(site).root.exists()
            with Warden(folder, until=until, max_disk_bytes=wishes.max_disk_bytes) as warden:
                code = run_site(recipe, site, resume)
            if code != INTERRUPTED_EXIT:
                return code or None
            if warden.reason is Reason.DISK:
                raise MachineUnfit(
                    f"left: {folder.root} holds {folder.used_bytes() / GIB:.1f} GiB, more than the "
                    f"{wishes.max_disk_gib:g} of --max-disk-gib: lend more, or delete logs there"
                )
            if warden.reason is None:
                say("left: run the same command to come back")
                return code
