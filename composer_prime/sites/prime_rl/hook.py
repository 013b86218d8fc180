"""Makes PRIME-RL's unmodified trainer a site of an outer run: what `outer/` installs where a run is named.

`OuterHook` says at which of the trainer's calls it acts, and what it does there.
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from composer_prime import metrics
from composer_prime.errors import ConfigError, FingerprintMismatch
from composer_prime.sites.prime_rl import checkpoints, versions
from composer_prime.sites.prime_rl.membership import Membership
from composer_prime.sites.prime_rl.outer.steps import Step, Trainer
from composer_prime.sites.prime_rl.result import FOLDER, WAITING
from composer_prime.sites.prime_rl.saying import ending_in_one_line, rank
from composer_prime.sites.prime_rl.settings import SITE, HookSettings
from composer_prime.store.keys import check_site_name
from composer_prime.sync.ranks import TIMEOUT_S
from composer_prime.waiting import Waits

Function = Callable[..., Any]


def make_site(settings: HookSettings, frame: FrameType) -> None:
    """Make the trainer that runs in `frame` a site. Raises ConfigError where it can't be one."""
    trainer = Trainer.of(frame)
    versions.check_config(trainer.config)
    try:
        check_site_name(settings.site)
    except ConfigError as error:
        raise ConfigError(f"{SITE}: {error}") from None
    OuterHook(settings, trainer, TrainerClock.put_into(frame.f_globals)).wrap()


class OuterHook:
    """The outer loop of one trainer process.

    on_loader           joins the run: the checkpoint is loaded then, and nothing is broadcast yet
    on_step             the outer loop's turn, after the optimizer and before broadcast and checkpoint
    CheckpointManager   saves and finds the outer state beside upstream's checkpoints
    """

    def __init__(self, settings: HookSettings, trainer: Trainer, clock: "TrainerClock") -> None:
        self._settings = settings
        self._clock = clock
        self._trainer = trainer
        self._loaded: checkpoints.OuterState | None = None
        self._membership: Membership | None = None

    def wrap(self) -> None:
        """Put ourselves into the trainer's calls; before all others, whose steps then see the round's weights."""
        self._trainer.on_loader.insert(0, self._join)
        self._trainer.on_step.insert(0, self._after_step)
        manager = versions.checkpoint_manager()
        manager.save, manager.load = self._saving(manager.save), self._loading(manager.load)

    def _saving(self, save: Function) -> Function:
        @functools.wraps(save)
        def saving(manager: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            # First ours: a checkpoint of upstream's that is whole has its outer state then.
            path = Path(manager.get_ckpt_path(step))
            if self._membership is not None:
                with ending_in_one_line():
                    self._membership.save(path)
            saved = save(manager, step, *args, **kwargs)
            if self._membership is not None and rank() == 0:
                checkpoints.end_saving(path)
            return saved

        return saving

    def _loading(self, load: Function) -> Function:
        signature = inspect.signature(load)

        @functools.wraps(load)
        def loading(manager: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            elsewhere = signature.bind(manager, step, *args, **kwargs).arguments.get("path")
            own = Path(manager.get_ckpt_path(step))
            path = Path(elsewhere or own)
            with ending_in_one_line(every_rank=True):
                checkpoints.check_whole(path)
            self._loaded = checkpoints.OuterState(checkpoints.outer_state_file(path), path.resolve() == own.resolve())
            return load(manager, step, *args, **kwargs)

        return loading

    def _join(self) -> None:
        """Join the run, on all ranks. Afterwards the parameters stand on its newest masters, own movement kept."""
        trainer = self._trainer
        timeout_s = min(TIMEOUT_S, trainer.config.dist_timeout_seconds / 4)
        with ending_in_one_line():
            if trainer.progress.step > 1 and self._loaded is None:
                raise ConfigError(
                    f"this PRIME-RL resumes at step {trainer.progress.step} and didn't load its checkpoint by "
                    f"CheckpointManager.load, by which composer-prime finds its own part of it: {versions.remedy()}"
                )
            try:
                folder = Path(trainer.config.output_dir) / FOLDER
                trainer.waits = Waits(folder / WAITING if rank() == 0 else None)
                self._membership = Membership.join(
                    *(self._settings, folder, trainer.parameters, self._loaded, timeout_s, trainer.waits)
                )
            except FingerprintMismatch as error:
                raise FingerprintMismatch(
                    f"{error}. In PRIME-RL names and shapes follow from trainer.model.impl, its fused layouts "
                    "(model.fusions) and LoRA: set these as the run's other sites have them"
                ) from None
        trainer.joined = True

    def _after_step(self, step: Step) -> None:
        """The outer loop's turn, on all ranks."""
        membership = self._membership
        assert membership is not None, "the first step's order has been checked"
        before = self._clock.stood_s
        with ending_in_one_line(), self._clock.standing():
            report = membership.after_step(step.tokens, step.samples, is_last=step.is_last)
        if report is not None:
            step.log(metrics.outer_values(report) | {metrics.OUTER_TURN_S: self._clock.stood_s - before})


class TrainerClock:
    """Python's `time` as the trainer's module sees it, and it alone: its `perf_counter` leaves our turns out.

    Upstream's `time/forward_backward` ends after `scheduler.step`, where our turn is; its throughput follows from it.
    """

    def __init__(self) -> None:
        self.stood_s = 0.0
        """Seconds of all turns so far."""

    @classmethod
    def put_into(cls, names: dict[str, Any]) -> "TrainerClock":
        """Take the place of `time` among a module's names, where it is there."""
        clock = cls()
        if names.get("time") is time:
            names["time"] = clock
        return clock

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def perf_counter(self) -> float:
        """Seconds, never less than before; as fast as the real one outside our turns."""
        return time.perf_counter() - self.stood_s

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Stand still for a turn. On the training thread, which alone asks."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stood_s += time.perf_counter() - started
