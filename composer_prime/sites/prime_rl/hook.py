"""Makes PRIME-RL's unmodified trainer a site of an outer run. Installed by importing our loss inside it.

Upstream imports the loss before it makes optimizer, scheduler and data loader, so the import can wrap those names in
the trainer's own module: `OuterHook` says which, and what each does.
"""

import functools
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from composer_prime import metrics
from composer_prime.errors import ComposerPrimeError, ConfigError, FingerprintMismatch, SiteError
from composer_prime.outer.fragments import trainable
from composer_prime.sites.prime_rl import versions
from composer_prime.sites.prime_rl.membership import Membership, Place, outer_state_file
from composer_prime.sites.prime_rl.result import FOLDER
from composer_prime.sync.ranks import TIMEOUT_S
from composer_prime.visible import log_handler

logger = logging.getLogger(__name__)

OUTER, SITE, KEY, SAME_NAME, MBIT_UP, MBIT_DOWN = (
    f"COMPOSER_PRIME_{name}" for name in ("OUTER", "SITE", "KEY", "SAME_NAME", "MAX_MBIT_UP", "MAX_MBIT_DOWN")
)

Function = Callable[..., Any]


@dataclass(frozen=True)
class HookSettings:
    """What the environment says.

    uri       the run's root in its bucket
    site      the site's name; None: that of upstream's run
    key_file  the site's private key, in a run that admits keys
    replace   whether the site takes its name over from a process that is still alive; otherwise it is refused
    mbit_up, mbit_down   that it moves to and from the bucket at most, on average; None: what the link gives
    """

    uri: str
    site: str | None
    key_file: Path | None
    replace: bool = True
    mbit_up: float | None = None
    mbit_down: float | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "HookSettings | None":
        """None where no outer run is configured. Raises ConfigError when only a part of one is."""
        said = {name: environ.get(name, "").strip() for name in (OUTER, SITE, KEY, SAME_NAME, MBIT_UP, MBIT_DOWN)}
        uri, site, key, same = (said[name] for name in (OUTER, SITE, KEY, SAME_NAME))
        if not uri:
            for name, value in said.items():
                if value:
                    raise ConfigError(
                        f"{name} is set ({value}) and {OUTER} isn't: set {OUTER} to the run's place in its bucket, "
                        "such as s3://bucket/runs/run-1, or unset both to train without an outer loop"
                    )
            return None
        if same not in ("", "replace", "refuse"):
            raise ConfigError(
                f'{SAME_NAME} ({same}) must be "replace" or "refuse": what to do when a process of its name is alive'
            )
        up, down = (_mbit(name, said[name]) for name in (MBIT_UP, MBIT_DOWN))
        return cls(uri, site or None, Path(key).expanduser() if key else None, same != "refuse", up, down)


def _mbit(name: str, value: str) -> float | None:
    """A limit of the link in Mbit/s; None where none is given. Raises ConfigError for what isn't one."""
    if not value:
        return None
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(f"{name} ({value}) must be a number above 0, in Mbit/s: correct it, or unset it for no limit")
    return found


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Make the trainer that is importing us a site of the run that `environ` names; do nothing where it names none.

    Ends the trainer with one line and exit code 2 when it can't be one. Raises ConfigError outside a trainer.
    """
    frame = versions.running_trainer()
    if frame is None:
        if HookSettings.read(environ) is not None:
            raise ConfigError(
                f"{OUTER} is set, and this process isn't PRIME-RL's trainer: set it under [trainer.env_vars] alone"
            )
        return
    with ending_in_one_line():
        settings = HookSettings.read(environ)
        if settings is not None:
            _install(settings, frame)


def _install(settings: HookSettings, frame: FrameType) -> None:
    """Wrap the names of the trainer that runs in `frame`. Raises ConfigError."""
    config = frame.f_locals["config"]
    upstream = versions.detect()
    versions.check_trainer(frame.f_globals)
    versions.check_config(config)
    _show_our_log()
    OuterHook(_place(settings, upstream, config), upstream, config).wrap(frame.f_globals)


def _place(settings: HookSettings, upstream: versions.Upstream, config: Any) -> Place:
    """Where this trainer stands. Raises ConfigError when it has no site name, or an illegal one."""
    from composer_prime.store.keys import check_site_name

    folder = Path(config.output_dir)
    name = settings.site or (folder.absolute().name if upstream.run_folders else None)
    if name is None:
        raise ConfigError(f"{SITE} must be set, since PRIME-RL {upstream.name} has no run.name: give the site a name")
    try:
        check_site_name(name)
    except ConfigError as error:
        raise ConfigError(f"{SITE}: {error}") from None
    limits = settings.mbit_up, settings.mbit_down
    return Place(settings.uri, name, settings.key_file, folder / FOLDER, settings.replace, *limits)


def _show_our_log() -> None:
    """Print what our code logs on the first rank, where upstream's logger doesn't take it."""
    ours = logging.getLogger("composer_prime")
    if _rank() == 0 and not ours.hasHandlers():
        ours.addHandler(log_handler())
        ours.setLevel(logging.INFO)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """End this rank with the error's exit code; its line is printed once, a lost rank's by each rank that noticed."""
    try:
        yield
    except ComposerPrimeError as error:
        if _rank() == 0 or isinstance(error, SiteError):
            print(f"composer-prime: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


class OuterHook:
    """The wrapped names of one trainer process, and what happens at each.

    setup_optimizer         remembers the parameters
    DataLoader              joins the run: the checkpoint is loaded then, and nothing is broadcast yet
    its get_batch           counts the trained tokens
    the scheduler's step    the outer loop's turn, after the optimizer and before broadcast and checkpoint
    CheckpointManager       saves and finds the outer state beside upstream's checkpoints
    """

    def __init__(self, place: Place, upstream: versions.Upstream, config: Any) -> None:
        self._place = place
        self._upstream = upstream
        self._config = config
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._state_file: Path | None = None
        self._membership: Membership | None = None
        self._progress: Any = None
        self._tokens = self._samples = 0
        self._counts = True

    def wrap(self, names: MutableMapping[str, Any]) -> None:
        """Put ourselves between the trainer's module and what it calls."""
        names["setup_optimizer"] = self._remembering(names["setup_optimizer"])
        names["setup_scheduler"] = self._stepping(names["setup_scheduler"])
        for name in ("DataLoader", "FakeDataLoader"):
            names[name] = self._joining(names[name])
        manager = versions.checkpoint_manager()
        manager.save, manager.load = self._saving(manager.save), self._loading(manager.load)

    def _remembering(self, setup: Function) -> Function:
        @functools.wraps(setup)
        def setup_optimizer(*args: Any, **kwargs: Any) -> Any:
            made = setup(*args, **kwargs)
            named = inspect.signature(setup).bind(*args, **kwargs).arguments["named_params"]
            self._parameters = list(trainable(named))  # type: ignore[arg-type]
            return made

        return setup_optimizer

    def _stepping(self, setup: Function) -> Function:
        @functools.wraps(setup)
        def setup_scheduler(*args: Any, **kwargs: Any) -> Any:
            scheduler = setup(*args, **kwargs)
            base = type(scheduler)

            def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
                base.step(scheduler, *args, **kwargs)
                self._after_step()

            # A class of its own: an attribute of the instance would go into checkpoints.
            scheduler.__class__ = type(base.__name__, (base,), {"step": step})
            return scheduler

        return setup_scheduler

    def _joining(self, loader: type[Any]) -> type[Any]:
        hook, signature = self, inspect.signature(loader)

        class JoiningLoader(loader):
            """Upstream's loader, which joins the run first and counts what it gives."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                hook._join(signature.bind(*args, **kwargs).arguments["dp_world_size"])
                super().__init__(*args, **kwargs)

            def get_batch(self) -> list[Any]:
                batches = super().get_batch()
                hook._count(batches)
                return batches

        return JoiningLoader

    def _saving(self, save: Function) -> Function:
        @functools.wraps(save)
        def saving(manager: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            # First ours: a checkpoint that upstream finds complete has its outer state then.
            if self._membership is not None:
                with ending_in_one_line():
                    self._membership.save(outer_state_file(Path(manager.get_ckpt_path(step))))
            return save(manager, step, *args, **kwargs)

        return saving

    def _loading(self, load: Function) -> Function:
        signature = inspect.signature(load)

        @functools.wraps(load)
        def loading(manager: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            loaded = load(manager, step, *args, **kwargs)
            elsewhere = signature.bind(manager, step, *args, **kwargs).arguments.get("path")
            self._state_file = outer_state_file(Path(elsewhere or manager.get_ckpt_path(step)))
            return loaded

        return loading

    def _join(self, dp_world_size: int) -> None:
        """Join the run, on all ranks. Afterwards the parameters stand on its newest masters, own movement kept."""
        import torch.distributed as dist

        frame = versions.running_trainer()
        assert isinstance(frame, FrameType)
        self._progress = frame.f_locals["progress"]
        ranks_per_batch = dist.get_world_size() // dp_world_size
        self._counts = dist.get_rank() % ranks_per_batch == 0  # context-parallel ranks get the same batch
        timeout_s = min(TIMEOUT_S, self._config.dist_timeout_seconds / 4)
        with ending_in_one_line():
            try:
                self._membership = Membership.join(self._place, self._parameters, self._state_file, timeout_s)
            except FingerprintMismatch as error:
                raise FingerprintMismatch(
                    f"{error}. In PRIME-RL names and shapes follow from trainer.model.impl, its fused layouts "
                    "(model.fusions) and LoRA: set these as the run's other sites have them"
                ) from None

    def _count(self, batches: list[Any]) -> None:
        if not self._counts:
            return
        for batch in batches:
            self._tokens += int(trained_tokens(batch).sum())
            self._samples += len(batch["sequence_lengths"])

    def _after_step(self) -> None:
        """The outer loop's turn, on all ranks."""
        membership = self._membership
        assert membership is not None, "the scheduler stepped before the data loader was made"
        (tokens, samples), self._tokens, self._samples = (self._tokens, self._samples), 0, 0
        max_steps, step = self._config.max_steps, self._progress.step
        with ending_in_one_line():
            report = membership.after_step(tokens, samples, is_last=max_steps is not None and step >= max_steps)
        if report is not None:
            self._upstream.log(metrics.outer_values(report), step)


def trained_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Which tokens of a micro batch any part of upstream's loss looks at: bool, as the batch's loss mask."""
    trained = batch["loss_mask"].to(torch.bool)
    for name in ("ce_weights", "ref_kl_weights"):
        weights = batch.get(name)
        if weights is not None:
            trained = trained | (weights != 0)
    return trained
