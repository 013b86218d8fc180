"""`composer-prime run` and `composer-prime site`: prepare, start the sites, watch them to their end, sum up.

One supervisor a site, all polled from this one loop. The sites share nothing but the bucket; one that fails is
reported and the others go on.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_prime.config.paths import RunPaths, SitePaths, models_cache
from composer_prime.config.recipe import Recipe
from composer_prime.config.settings import WITHOUT_WEIGHTS, SiteSettings, settle_site
from composer_prime.errors import BadInput, SiteRevoked
from composer_prime.private import users_umask
from composer_prime.sites.embedded.conversations import before_and_after
from composer_prime.sites.embedded.folder import Claim
from composer_prime.sites.embedded.ports import claim_ports
from composer_prime.sites.embedded.processes import Interrupt, answer_of, catch_interrupt
from composer_prime.sites.embedded.progress import WAITING, Screen, SiteNumbers, SiteProgress
from composer_prime.sites.embedded.start import import_tokenizers
from composer_prime.sites.embedded.summary import draw_summary, dropped_lines, teacher_lines, write_summary
from composer_prime.sites.embedded.supervisor import SiteState, SiteSupervisor, role_command, stop_sites
from composer_prime.sites.preflight import Found, check, rehearsed
from composer_prime.store.keys import check_site_name
from composer_prime.teachers.fingerprint import load_tokenizer
from composer_prime.teachers.pool import TeacherPool

INTERRUPTED_EXIT = 130
PLAIN_WIDTH = 140
"""Columns where the output is no terminal: room for the table's every number."""
POLL_S = 0.2


# The model is resolved by a process of its own, since that needs torch and this one shouldn't.
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
    return _run(recipe, recipe.site_names, resume, surroundings or Surroundings(), joins=False)


def run_site(recipe: Recipe, site: str, resume: bool, surroundings: Surroundings | None = None) -> int:
    """Run one site of a recipe, which joins the run in the bucket or is its first; the exit code as for `run_local`."""
    return _run(recipe, (check_site_name(site),), resume, surroundings or Surroundings(), joins=True)


def _run(recipe: Recipe, sites: Sequence[str], resume: bool, surroundings: Surroundings, *, joins: bool) -> int:
    began = time.monotonic()
    claim, took = check(recipe, sites, resume, joins=joins, rehearse=surroundings.rehearse)
    surroundings.say(took)
    if claim.old is None:
        claim.take()
    supervisors: list[SiteSupervisor] = []
    with catch_interrupt() as interrupt:
        if left := [site for site in sites if not (resume and _has_ended(recipe, claim.paths.site(site)))]:
            model_dir = _model_folder(recipe, claim, surroundings, interrupt)
            if model_dir is not None:
                check_streams(recipe, model_dir)
                settled = [
                    settle_site(recipe, site, inference_port=port, model_dir=model_dir, resume=resume)
                    for site, port in zip(left, claim_ports(recipe, left), strict=True)
                ]
                claim.take()
                supervisors = [SiteSupervisor(one, began=began, command=surroundings.role_command) for one in settled]
                _watch(supervisors, recipe.max_steps, surroundings.console, interrupt)
            elif claim.old is not None:
                return INTERRUPTED_EXIT  # what was there is as it was
    _sum_up(claim.paths, sites, surroundings)
    if interrupt.is_set:
        if surroundings.continuing is not None:
            surroundings.say(f"Stopped. {surroundings.continuing}")
        return INTERRUPTED_EXIT
    return max((each.error.exit_code for each in supervisors if each.error is not None), default=0)


def _has_ended(recipe: Recipe, paths: SitePaths) -> bool:
    """Whether a site in this folder has made all the steps that the recipe asks for now."""
    return paths.result.exists() and SiteSettings.load(paths.root).recipe.max_steps >= recipe.max_steps


def _model_folder(recipe: Recipe, claim: Claim, surroundings: Surroundings, interrupt: Interrupt) -> Path | None:
    """The model's folder; None when interrupted."""
    surroundings.say(f"preparing model {recipe.model.name}, seed {recipe.run.seed}")
    with tempfile.TemporaryDirectory() as beside:  # a run that --clean may yet leave as it is
        root = Path(beside) if claim.old == claim.paths.root else claim.paths.root
        command, log = surroundings.model_command(recipe), root / "logs" / "model.log"
        said = answer_of("model", command, log, is_stopped=lambda: interrupt.is_set, umask=users_umask())
    return None if said is None else Path(said.strip().splitlines()[-1])


def check_streams(recipe: Recipe, model_dir: Path) -> None:
    """Compare the recipe's teachers, hints' too, with the model's tokenizer. Raises TeacherRefused."""
    top_k = recipe.trainer.distill.top_k
    pools = [TeacherPool(recipe.replay.teachers, top_k)] if recipe.replay.teachers else []
    if recipe.hints is not None and recipe.hints.server is not None:
        pools.append(TeacherPool([recipe.hints.server], top_k, table="hints"))
    if pools:
        import_tokenizers()
        asyncio.run(_check(pools, load_tokenizer(model_dir)))


async def _check(pools: Sequence[TeacherPool], tokenizer: Any) -> None:
    async with AsyncExitStack() as stack:
        for pool in pools:
            stack.push_async_callback(pool.close)
            await pool.check(tokenizer)


def _sum_up(paths: RunPaths, sites: Sequence[str], surroundings: Surroundings) -> None:
    """Write the summary, and show it with a conversation or two."""
    before_and_after(paths, sites, surroundings.console)
    summary = write_summary(paths)
    surroundings.console.print(draw_summary(summary))
    for line in (*teacher_lines(summary), *dropped_lines(summary)):
        surroundings.say(line)
    for path in (paths.summary, paths.reward_plot):
        if path.exists():
            surroundings.say(str(path))


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
        self._sites = [(each, SiteProgress(each.paths)) for each in supervisors]
        for _, progress in self._sites:
            progress.update()
        self._trained_before = {each.site: progress.num_trained for each, progress in self._sites}

    def look(self) -> Mapping[str, tuple[str, SiteNumbers]]:
        """State and numbers of each site, as of now."""
        return {each.site: self._show(each, progress) for each, progress in self._sites}

    def has_step(self) -> bool:
        """Whether any site has trained a step."""
        return any(numbers.step for _, numbers in self.look().values())

    def _show(self, supervisor: SiteSupervisor, progress: SiteProgress) -> tuple[str, SiteNumbers]:
        """A site that comes back is starting, too, until it trains: its numbers are those from before."""
        numbers = progress.update()
        if isinstance(supervisor.error, SiteRevoked):
            return "revoked", numbers
        trains = progress.num_trained > self._trained_before[supervisor.site]
        if supervisor.state is SiteState.RUNNING and numbers.waiting is not None:
            return WAITING, numbers
        starting = supervisor.state is SiteState.RUNNING and not trains
        return "starting" if starting else supervisor.state.value, numbers
