"""Starts the three processes of one site, watches them, restarts what may be restarted, and ends them all.

A supervisor owns no thread: its driver (local_run.py) polls it, so one process can hold several. Its sites still
share nothing but the bucket: every child knows only its own site's folder.
"""

from __future__ import annotations

import enum
import fcntl
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

from composer_prime.bearer import SITE_TOKEN, new_token
from composer_prime.config.paths import SitePaths
from composer_prime.config.settings import SiteSettings
from composer_prime.errors import BadInput, ComposerPrimeError, SystemRefused
from composer_prime.metrics import SITE_WALL_S, MetricsTape
from composer_prime.sites.embedded import start
from composer_prime.sites.embedded.checkpoints import set_damaged_aside
from composer_prime.sites.embedded.processes import QUIET_ENV, Child, describe_exit, failure, stop

ROLES: tuple[str, ...] = ("inference", "orchestrator", "trainer")
MAX_RESTARTS = 3
"""Of an inference server, which holds nothing that isn't on disk. Any other early end is its site's, until --resume."""

TRAINER_GRACE_S = 30.0
"""Seconds a trainer has to finish its step and write a checkpoint, and a monitor what it holds, before it is killed."""
GRACE_S = 10.0
"""Seconds the other roles have to end."""

ALONE_S = 30.0
"""Longest that the others wait for a trainer that is started before them."""

WALL_ROLE = "supervisor"
PROBE_BYTES = 2**16

_OFFLINE = {"HF_HUB_OFFLINE": "1"}  # the model is a local folder by now; an environment may still load a dataset
_ENV = {"inference": QUIET_ENV | _OFFLINE, "orchestrator": QUIET_ENV, "trainer": QUIET_ENV | _OFFLINE}

logger = logging.getLogger(__name__)


class Verdict(enum.Enum):
    """What an ended process means for its site."""

    EXPECTED = "expected"  # nothing to do
    RESTART = "restart"  # start it again
    FINISHED = "finished"  # the site has its result: wind down
    BAD_INPUT = "bad input"  # its last log line tells the person what to change; or the system refuses it more
    CRASHED = "crashed"  # its last log lines are for whoever debugs it


def judge_exit(role: str, exit_code: int, num_restarts: int, has_result: bool) -> Verdict:
    """What follows from the end of one process.

    exit_code     as subprocess gives it: negative for a signal.
    num_restarts  how often this role was restarted before.
    has_result    whether the trainer's result file is there: from then on the others may end as they like.
    """
    if role == "trainer":
        if exit_code == 0 and has_result:
            return Verdict.FINISHED
    elif has_result:
        return Verdict.EXPECTED
    if exit_code in (BadInput.exit_code, SystemRefused.exit_code):
        return Verdict.BAD_INPUT
    if role == "inference" and num_restarts < MAX_RESTARTS:
        return Verdict.RESTART
    return Verdict.CRASHED


class SiteState(enum.Enum):
    """Where a site stands, as its supervisor sees it."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


def role_command(role: str, site_dir: Path) -> list[str]:
    """The command of one role's process."""
    return [sys.executable, "-m", start.__name__, f"{start.__package__}.{role}", str(site_dir)]


class SiteSupervisor:
    """One site's processes. `start`, then `poll` until `state` isn't RUNNING, and `stop` in any case.

    settings  as settled; written into the site's folder by `start`.
    began     time.monotonic() at which the site's wall time starts to count; now, unless given.
    command   what to run for a role, given the site's folder.
    """

    def __init__(
        self,
        settings: SiteSettings,
        *,
        began: float | None = None,
        command: Callable[[str, Path], Sequence[str]] = role_command,
    ) -> None:
        self.settings = settings
        self.site = settings.site
        self.paths = settings.paths
        self.state = SiteState.WAITING
        self.error: ComposerPrimeError | None = None
        self.children: dict[str, Child] = {}
        self.num_restarts = dict.fromkeys(ROLES, 0)
        self.monitors: dict[str, Child] = {}
        self._token = new_token()
        self._began = time.monotonic() if began is None else began
        self._command = command
        self._lock: IO[str] | None = None
        self._alone_until = 0.0

    def start(self) -> None:
        """Write the settings and start the processes; they find each other through files and HTTP.

        All at once, but where the trainer must fetch all it starts from: then the others, who can't do anything before
        it has, leave it the cores until it has loaded, and load while it fetches.

        Raises BadInput when another supervisor runs this site from the same folder, CorruptObject when it resumes and
        none of its checkpoints is sound.
        """
        self._lock = lock_site(self.paths)
        if self.settings.resume:
            set_damaged_aside(self.paths.checkpoints)
        self.settings.save()
        waiting = [self.paths.waiting(role) for role in ROLES]
        for left in (self.paths.result, self.paths.loaded, *waiting):
            left.unlink(missing_ok=True)
        for name in self.settings.recipe.monitors.model_dump(exclude_none=True):
            command = [sys.executable, "-m", f"{start.__package__}.monitors", str(self.paths.root), name]
            self.monitors[name] = Child(f"{self.site}/{name}", command, self.paths.log(name), env=QUIET_ENV)
        self._start("trainer")
        self._alone_until = 0.0 if self.settings.has_weights else time.monotonic() + ALONE_S
        self.state = SiteState.RUNNING
        self._start_others()

    def poll(self) -> None:
        """Look at the processes once and act on those that ended; returns at once unless the site ends here."""
        if self.state is not SiteState.RUNNING:
            return
        self._tell_of_monitors()
        ended = {role: code for role, child in self.children.items() if (code := child.poll()) is not None}
        has_result = self.paths.result.exists()  # looked up after the exits, so that an exit it caused finds it
        verdicts = {role: judge_exit(role, code, self.num_restarts[role], has_result) for role, code in ended.items()}
        for verdict in (Verdict.BAD_INPUT, Verdict.CRASHED, Verdict.FINISHED):
            for role in (role for role in ROLES if verdicts.get(role) is verdict):
                self._end(role, ended[role], verdict)
                return
        for role in (role for role in ROLES if verdicts.get(role) is Verdict.RESTART):
            self._restart(role, ended[role])
        self._start_others()

    def stop(self) -> None:
        """End what still runs: the trainer first, which writes a checkpoint, then the others."""
        stop_sites([self])

    def close(self, state: SiteState) -> None:
        """Once all processes are gone: tape the wall time, and let another supervisor run this site."""
        if self._lock is None:
            return
        self.state = state
        self._tell_of_monitors()
        try:
            with MetricsTape(self.paths.tape(WALL_ROLE)) as tape:
                tape.log(0, **{SITE_WALL_S: time.monotonic() - self._began})
        except OSError as error:
            self.error = self.error or SystemRefused.of(error, self.paths.root)
            if self.error is None:
                raise
        self._lock.close()
        self._lock = None

    def _start_others(self) -> None:
        """Start what hasn't been started yet, once the trainer needn't be alone any more."""
        if self.paths.loaded.exists() or time.monotonic() >= self._alone_until:
            for role in ROLES:
                if role not in self.children:
                    self._start(role)

    def _start(self, role: str) -> None:
        command = self._command(role, self.paths.root)
        env = _ENV[role] | {SITE_TOKEN: self._token}
        self.children[role] = Child(f"{self.site}/{role}", command, self.paths.log(role), env=env)
        logger.info("site=%s role=%s pid=%d started", self.site, role, self.children[role].pid)

    def _restart(self, role: str, exit_code: int) -> None:
        self.num_restarts[role] += 1
        logger.warning(
            "site=%s role=%s ended=%r restart=%d", self.site, role, describe_exit(exit_code), self.num_restarts[role]
        )
        self._start(role)

    def _tell_of_monitors(self) -> None:
        """Say once which monitors failed. The site trains on."""
        for name, child in list(self.monitors.items()):
            if child.poll() and (said := child.tail(1)):
                del self.monitors[name]
                logger.warning("site %s isn't logged in %s: %s", self.site, name, said[0].removeprefix("error: "))

    def _end(self, role: str, exit_code: int, verdict: Verdict) -> None:
        if verdict is not Verdict.FINISHED:
            self.error = refused_in(self.paths.root) or failure(self.children[role], exit_code)
        stop_sites([self], SiteState.DONE if verdict is Verdict.FINISHED else SiteState.FAILED)


def stop_sites(supervisors: Iterable[SiteSupervisor], state: SiteState = SiteState.STOPPED) -> None:
    """End the processes of several sites together: all trainers first, monitors last; none is left.

    state  what sites that still ran are in afterwards.
    """
    supervisors = list(supervisors)
    try:
        for roles, grace_s in ((("trainer",), TRAINER_GRACE_S), (("orchestrator", "inference"), GRACE_S)):
            stop([child for each in supervisors for role, child in each.children.items() if role in roles], grace_s)
        stop([child for each in supervisors for child in each.monitors.values()], TRAINER_GRACE_S)
    finally:
        for each in supervisors:
            for child in (*each.children.values(), *each.monitors.values()):
                child.kill()
            each.close(state)


def lock_site(paths: SitePaths) -> IO[str]:
    """Hold the site's folder until the returned file is closed, or this process ends in whatever way.

    Raises BadInput when another process holds it.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    file = (paths.root / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BadInput(
            f"site {paths.root.name} is already running in {paths.root}: stop that process, or start another run with "
            "--run.name, or a site of another name with `composer-prime site`"
        ) from None
    return file


def refused_in(folder: Path) -> SystemRefused | None:
    """What the system refuses in a folder now: a process that ended of it had no place for its last words there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return SystemRefused.of(error, folder)
    return None
