"""`composer-prime run` and `composer-prime site`: prepare, start the sites, watch them to their end, sum up.

One supervisor a site, all polled from this one loop. The sites share nothing but the bucket; one that fails is
reported and the others go on.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from composer_prime.config.paths import RunPaths
from composer_prime.config.recipe import Recipe
from composer_prime.config.settings import SiteSettings
from composer_prime.errors import BadInput, SiteRevoked
from composer_prime.sites.embedded.conversation_view import before_and_after
from composer_prime.sites.embedded.folder import Claim
from composer_prime.sites.embedded.interrupt import Interrupt, catch_interrupt
from composer_prime.sites.embedded.prepare import (
    ModelResolution,
    check_streams,
    model_command,
    settle_sites,
)
from composer_prime.sites.embedded.progress import SiteFollower, SiteNumbers
from composer_prime.sites.embedded.screen import WAITING, Screen
from composer_prime.sites.embedded.summary import draw_summary, dropped_lines, teacher_lines, write_summary
from composer_prime.sites.embedded.supervisor import SiteState, SiteSupervisor, role_command, stop_sites
from composer_prime.sites.preflight import Found, check, rehearsed
from composer_prime.store.keys import check_site_name

INTERRUPTED_EXIT = 130
PLAIN_WIDTH = 140
"""Columns where the output is no terminal: room for the table's every number."""
POLL_S = 0.2


@dataclass(frozen=True)
class Surroundings:
    """Where a run is shown, and what it runs: for a role, given its site's folder; for the model, given the recipe."""

    console: Console = field(default_factory=lambda: Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    continuing: str | None = "The same command with --resume continues from the bucket and the local checkpoints."
    """Said of a run that was interrupted; None: whoever called says more."""
    role_command: Callable[[str, Path], Sequence[str]] = role_command
    model_command: Callable[[Recipe], Sequence[str]] = model_command
    rehearse: Callable[[Recipe, str], Found] = rehearsed

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def run_local(recipe: Recipe, resume: bool, surroundings: Surroundings | None = None) -> int:
    """Run all the sites of a recipe on this machine until they are done; the exit code.

    0 when every site finished, 130 when interrupted, else 2 or 1 as the failed sites' errors say. With `resume`, sites
    that had finished stay as they are and the others continue.

    Raises BadInput for what a person can fix, before or right after the start.
    """
    return _checked_run(recipe, recipe.site_names, resume, surroundings or Surroundings(), joins=False)


def run_site(recipe: Recipe, site: str, resume: bool, surroundings: Surroundings | None = None) -> int:
    """Run one site of a recipe, which joins the run in the bucket or is its first; the exit code as for `run_local`."""
    return _checked_run(recipe, (check_site_name(site),), resume, surroundings or Surroundings(), joins=True)


@dataclass(frozen=True)
class _Launch:
    recipe: Recipe
    claim: Claim
    sites: Sequence[str]
    resume: bool
    began: float

    @property
    def paths(self) -> RunPaths:
        return self.claim.paths

    def has_ended(self, site: str) -> bool:
        """Whether a site in this folder has made all the steps that the recipe asks for now."""
        paths = self.paths.site(site)
        return paths.result.exists() and SiteSettings.load(paths.root).recipe.max_steps >= self.recipe.max_steps


def _checked_run(recipe: Recipe, sites: Sequence[str], resume: bool, surroundings: Surroundings, *, joins: bool) -> int:
    began = time.monotonic()
    claim, took = check(recipe, sites, resume, joins=joins, rehearse=surroundings.rehearse)
    surroundings.say(took)
    if claim.old is None:
        claim.take()
    return _run(_Launch(recipe, claim, sites, resume, began), surroundings)


def _run(launch: _Launch, surroundings: Surroundings) -> int:
    console = surroundings.console
    supervisors: list[SiteSupervisor] = []
    with catch_interrupt() as interrupt:
        sites = [site for site in launch.sites if not (launch.resume and launch.has_ended(site))]
        model_dir = _prepare(launch, surroundings, interrupt) if sites else None
        if sites and model_dir is None and launch.claim.old is not None:
            return INTERRUPTED_EXIT  # what was there is as it was
        if model_dir is not None:
            settled = settle_sites(launch.recipe, sites, model_dir, launch.resume)
            launch.claim.take()
            supervisors = [
                SiteSupervisor(each, began=launch.began, command=surroundings.role_command) for each in settled
            ]
            _watch(supervisors, launch.recipe.max_steps, console, interrupt)
    before_and_after(launch.paths, launch.sites, console)
    summary = write_summary(launch.paths)
    console.print(draw_summary(summary))
    for line in (*teacher_lines(summary), *dropped_lines(summary)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for path in (launch.paths.summary, launch.paths.reward_plot):
        if path.exists():
            console.print(str(path), soft_wrap=True, highlight=False)
    if interrupt.is_set:
        if surroundings.continuing is not None:
            console.print(f"Stopped. {surroundings.continuing}")
        return INTERRUPTED_EXIT
    return max((each.error.exit_code for each in supervisors if each.error is not None), default=0)


def _prepare(launch: _Launch, surroundings: Surroundings, interrupt: Interrupt) -> Path | None:
    """The model's folder; None when interrupted."""
    recipe = launch.recipe
    surroundings.say(f"preparing model {recipe.model.name}, seed {recipe.run.seed}")
    with tempfile.TemporaryDirectory() as beside:  # a run that --clean may yet leave as it is
        claim = launch.claim
        model = ModelResolution(
            surroundings.model_command(recipe), RunPaths(Path(beside)) if claim.old == claim.paths.root else claim.paths
        )
        try:
            folder = model.wait(lambda: interrupt.is_set)
        finally:
            model.stop()
    if folder is not None:
        check_streams(recipe, folder)
    return folder


def _watch(supervisors: Sequence[SiteSupervisor], max_steps: int, console: Console, interrupt: Interrupt) -> None:
    """Start all sites at once and see them to their end; none of their processes is left, however this ends.

    Raises a site's BadInput when no site has trained a step yet: they all run the same recipe. A later failure is
    said on the screen, and the other sites go on.
    """
    view = _View(supervisors)
    with Screen(console, max_steps, view.look) as screen:
        try:
            for each in supervisors:
                each.start()
            while any(each.state is SiteState.RUNNING for each in supervisors) and not interrupt.is_set:
                for each in supervisors:
                    _poll(each, view, screen)
                screen.update()
                time.sleep(POLL_S)
            if interrupt.is_set:
                screen.say("stopping: each trainer writes a checkpoint first; interrupt again to stop at once")
        finally:
            stop_sites(supervisors)


def _poll(supervisor: SiteSupervisor, view: _View, screen: Screen) -> None:
    if supervisor.state is not SiteState.RUNNING:
        return
    supervisor.poll()
    if supervisor.error is None:
        return
    if isinstance(supervisor.error, BadInput) and not view.has_step():
        raise supervisor.error
    is_revoked = isinstance(supervisor.error, SiteRevoked)
    screen.say(str(supervisor.error) if is_revoked else f"site {supervisor.site} failed: {supervisor.error}")


class _View:
    """What the screen shows of each supervised site."""

    def __init__(self, supervisors: Sequence[SiteSupervisor]) -> None:
        self._sites = [(each, SiteFollower(each.paths)) for each in supervisors]
        for _, follower in self._sites:
            follower.update()
        self._trained_before = {each.site: follower.progress.num_trained for each, follower in self._sites}

    def look(self) -> Mapping[str, tuple[str, SiteNumbers]]:
        """State and numbers of each site, as of now."""
        return {each.site: self._show(each, follower) for each, follower in self._sites}

    def has_step(self) -> bool:
        """Whether any site has trained a step."""
        return any(numbers.step for _, numbers in self.look().values())

    def _show(self, supervisor: SiteSupervisor, follower: SiteFollower) -> tuple[str, SiteNumbers]:
        """A site that comes back is starting, too, until it trains: its numbers are those from before."""
        numbers = follower.update()
        if isinstance(supervisor.error, SiteRevoked):
            return "revoked", numbers
        trains = follower.progress.num_trained > self._trained_before[supervisor.site]
        if supervisor.state is SiteState.RUNNING and numbers.waiting is not None:
            return WAITING, numbers
        starting = supervisor.state is SiteState.RUNNING and not trains
        return "starting" if starting else supervisor.state.value, numbers
