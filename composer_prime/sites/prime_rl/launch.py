"""`composer-prime run` and `composer-prime site` where the sites are PRIME-RLs: render, start `rl`, watch it end.

One `rl` for each site; everything that can be refused is refused before the first one starts. What it prints is passed
on, and so are its exit code and the signal that ends us. Where the outer run ends before `max_steps`, we end `rl`.
"""

import json
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from composer_prime.config.paths import RunPaths, SitePaths, run_uri
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.toml import to_toml
from composer_prime.errors import ConfigError
from composer_prime.private import users_umask
from composer_prime.sites.embedded.processes import Child, Interrupt, catch_interrupt, describe_exit, stop
from composer_prime.sites.embedded.supervisor import lock_site
from composer_prime.sites.preflight import check
from composer_prime.sites.prime_rl.checkpoints import newest_whole
from composer_prime.sites.prime_rl.installation import Installation, find_installation
from composer_prime.sites.prime_rl.placement import Placement, place_sites
from composer_prime.sites.prime_rl.result import RunEnd
from composer_prime.sites.prime_rl.toml import ORCHESTRATOR_FOLDER, RUN_FOLDER, Data, SiteFiles, render
from composer_prime.store import keys, open_store
from composer_prime.sync.founding import FoundingRecord, announce, first_keys
from composer_prime.sync.terms import terms_of
from composer_prime.waiting import Waiting, read_waiting

INTERRUPTED_EXIT = 130
CONTINUING = "The same command with --resume continues from the bucket and PRIME-RL's checkpoints."
GRACE_S = 60.0
"""Seconds an `rl` has to end its own processes before it is killed with all of them."""
POLL_S = 0.2
ROLE = "rl"
DRY_RUN_SUFFIX = ".dry-run"
"""What is added to the run's folder where nothing is started, so that the run still finds its own place empty."""

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Prepared:
    """One site, ready to start."""

    site: str
    paths: SitePaths
    data: Data
    placement: Placement
    beginning: str

    @property
    def file(self) -> Path:
        return self.paths.root / "rl.toml"


def run_local(recipe: PrimeRecipe, resume: bool, *, dry_run: bool = False, say: Say = print) -> int:
    """Run all sites of a recipe on this machine until they are done; the exit code.

    0 when every site's `rl` ended so, or was stopped since its outer run had ended; 130 when interrupted; else that of
    the first site that failed.
    dry_run  let PRIME-RL check and resolve what is rendered, and start nothing.

    Raises BadInput for what a person can fix, before anything starts.
    """
    installation = find_installation(recipe.prime_rl)
    prepared = _prepare(recipe, place_sites(recipe), installation, resume, dry_run)
    if not dry_run:
        claim, _ = check(recipe, recipe.site_names, resume)
        claim.take()
        found_run(recipe, recipe.site_names[0])
    return _run(prepared, installation, dry_run, say)


def run_site(
    recipe: PrimeRecipe,
    site: str,
    resume: bool,
    *,
    dry_run: bool = False,
    say: Say = print,
    continuing: str | None = CONTINUING,
) -> int:
    """Run one site of a recipe, which has this machine to itself; all else as for `run_local`.

    continuing   said when it was interrupted; None: whoever called says more
    """
    installation = find_installation(recipe.prime_rl)
    prepared = _prepare(recipe, {keys.check_site_name(site): Placement()}, installation, resume, dry_run)
    if not dry_run:
        claim, _ = check(recipe, (site,), resume, joins=True)
        found_run(recipe, site)
        claim.take()
    return _run(prepared, installation, dry_run, say, continuing)


def found_run(recipe: PrimeRecipe, site: str) -> None:
    """See to it that the bucket holds the recipe's run, or the word of what it shall be, in which `site` is admitted.

    Raises FingerprintMismatch or BadInput when it holds another run, StoreUnusable when it can't be used.
    """
    uri = run_uri(recipe)
    if recipe.outer is None or uri is None:
        return
    with closing(open_store(uri, recipe.site.key_file)) as store:
        if not store.list(keys.manifest()):
            owner, first = recipe.outer.owner, first_keys(recipe, site)
            announce(store, FoundingRecord(run=recipe.run.name, terms=terms_of(recipe), owner=owner, keys=first))


def _prepare(
    recipe: PrimeRecipe, placed: Mapping[str, Placement], installation: Installation, resume: bool, dry_run: bool
) -> list[_Prepared]:
    """Each site's configuration. Nothing is written yet. Raises ConfigError."""
    run = RunPaths.of(recipe)
    if dry_run:
        run = RunPaths(run.root.with_name(run.root.name + DRY_RUN_SUFFIX))
    prepared = []
    for site, placement in placed.items():
        paths = run.site(site)
        step, beginning = None, ""
        if resume and not dry_run:
            step, beginning = _resume_step(paths, installation.version)
        files = SiteFiles(site, paths.root, step, (resume or dry_run) and step is None, placement.ports)
        data = render(recipe, installation.version, files)
        prepared.append(_Prepared(site, paths, data, placement, beginning))
    return prepared


def _resume_step(paths: SitePaths, version: str) -> tuple[int | None, str]:
    """The newest step of which a site has all there is to resume, None where it has none; and what to say of it."""
    folder = paths.root / RUN_FOLDER
    trainers = folder / "checkpoints"
    step = newest_whole(trainers, folder / ORCHESTRATOR_FOLDER[version] / "checkpoints")
    if step is not None:
        return step, f", from step {step}"
    if any(trainers.glob("step_*/trainer/.metadata")):  # they would be deleted
        raise ConfigError(
            f"{trainers} holds checkpoints of the trainer, and of none is all there that resuming takes (its files, "
            "checkpoints/outer, the orchestrator's progress.pt): put back what is missing, or start over from the "
            "run's masters by `composer-prime site` with --clean instead of --resume, which deletes this site's folder"
        )
    return None, f", from the start: no checkpoint in {trainers} is whole" if any(trainers.glob("step_*")) else ""


def _run(
    prepared: Sequence[_Prepared],
    installation: Installation,
    dry_run: bool,
    say: Say,
    continuing: str | None = CONTINUING,
) -> int:
    several = len(prepared) > 1
    locks = []
    running: list[_Running] = []
    with catch_interrupt() as interrupt:
        try:
            for each in prepared:
                locks.append(lock_site(each.paths))
                each.file.write_text(to_toml(each.data), encoding="utf-8")
                say(f"site {each.site}: PRIME-RL {installation.version}, {each.file}{each.beginning}")
            for each in prepared:
                end = RunEnd(each.paths.root / RUN_FOLDER)
                child = _start(each, installation, dry_run)
                running.append(_Running(each.site, child, end, f"[{each.site}] " if several else ""))
            _watch(running, interrupt, say)
        finally:
            stop([one.child for one in running], GRACE_S)
            for one in running:
                one.close()
            for lock in locks:
                lock.close()
    return _exit_code(running, interrupt, say, continuing)


def _start(each: _Prepared, installation: Installation, dry_run: bool) -> Child:
    command = [*installation.command, "@", str(each.file), *(["--dry-run"] if dry_run else [])]
    logger.info("site=%s command=%s environment=%s", each.site, command, json.dumps(each.placement.environment))
    env = {"PYTHONUNBUFFERED": "1", **each.placement.environment}
    return Child(
        f"{each.site}/{ROLE}", command, each.paths.log(ROLE), env=env, umask=users_umask(), orphan=signal.SIGTERM
    )


class _Running:
    """One site's `rl`: passes on what it writes to its log, by whole lines, and ends it once its run has ended."""

    def __init__(self, site: str, child: Child, end: RunEnd, prefix: str) -> None:
        self.site = site
        self.child = child
        self.stopped = False
        self._end = end
        self._kill_at = 0.0
        self._file = child.log.open("rb")
        self._file.seek(child.log_start)
        self._prefix = prefix
        self._rest = b""
        self._waiting: Waiting | None = None

    def pass_on(self, say: Say, *, at_end: bool = False) -> None:
        """Say the lines that are new; `at_end` the last one too, if it has no end of line."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        if at_end and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            say(self._prefix + line.decode("utf-8", errors="replace").rstrip("\r"))

    def say_wait(self, say: Say) -> None:
        """Say what the site's trainer waits for, once, and when that is over."""
        told = read_waiting(self._end.waiting)
        if told != self._waiting:
            say(f"site {self.site}: " + ("goes on" if told is None else f"waits {told}"))
            self._waiting = told

    def end_with_its_run(self, say: Say) -> None:
        """Once the run has ended, ask `rl` to end, and see to it after a grace."""
        if self.child.poll() is not None:
            return
        if not self.stopped and self._end.has_come():
            say(f"site {self.site}: the outer run has ended, and steps are left that would change nothing: stopping rl")
            self.stopped, self._kill_at = True, time.monotonic() + GRACE_S
            self.child.terminate()
        elif self.stopped and time.monotonic() > self._kill_at:
            self.child.kill()

    def close(self) -> None:
        self._file.close()


def _watch(running: Sequence[_Running], interrupt: Interrupt, say: Say) -> None:
    """See all sites to their end, or to an interrupt, which ends them. What they say is passed on to the last line."""
    try:
        while any([one.child.poll() is None for one in running]) and not interrupt.is_set:
            for one in running:
                one.pass_on(say)
                one.say_wait(say)
                one.end_with_its_run(say)
            time.sleep(POLL_S)
        if interrupt.is_set:
            say("stopping: PRIME-RL ends its processes first; interrupt again to stop at once")
            stop([one.child for one in running], GRACE_S)
    finally:
        for one in running:
            one.pass_on(say, at_end=True)


def _exit_code(running: Sequence[_Running], interrupt: Interrupt, say: Say, continuing: str | None) -> int:
    if interrupt.is_set:
        if continuing is not None:
            say(f"Stopped. {continuing}")
        return INTERRUPTED_EXIT
    codes = [0 if one.stopped else one.child.poll() or 0 for one in running]
    for one, code in zip(running, codes, strict=True):
        if code:
            say(f"site {one.site}: rl ended with {describe_exit(code)}; its log is {one.child.log}")
    return next((code if code > 0 else 128 - code for code in codes if code), 0)
