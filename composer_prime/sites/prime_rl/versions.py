"""What differs between PRIME-RL's versions where our code touches its trainer: the only module that knows.

Nothing of upstream is imported here: a version is told by the files it has, and the trainer that is running is found
on the stack of whoever imports our loss.
"""

import asyncio
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from composer_prime.errors import ConfigError

TESTED = "v0.7.0, v0.8.0 and commit 559b447 (v0.8.1.dev67)"
"""The versions of PRIME-RL that the tests with the marker `prime_rl` ran against."""

KNOWN_RELEASES = ("0.7.0", "0.8.0", "0.8.1.dev")
"""What `prime-rl` may say of its own version; a main of 0.8 still calls itself 0.8.0."""

TRAINER_NAMES = ("setup_optimizer", "setup_scheduler", "DataLoader", "FakeDataLoader")
"""Names in the module of upstream's `train` that it looks up when it runs."""

_CHECKPOINTS = "prime_rl.trainer.ckpt"


@dataclass(frozen=True)
class Upstream:
    """One layout of PRIME-RL.

    name         the version or commit that stands for it
    run_folders  whether a run's folder is named for `run.name`; before that there is no such name
    monitors     the module with its metric monitors
    """

    name: str
    run_folders: bool
    monitors: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Give metrics to upstream's own monitors (wandb, the metrics file), under the training step."""
        monitors = sys.modules[self.monitors]
        record = {**values, "step": step}
        if self.run_folders:
            asyncio.run(monitors.log(record, step=step))
        else:
            monitors.get_monitor().log(record, step=step)


V0_7 = Upstream("v0.7.0", run_folders=False, monitors="prime_rl.utils.monitor")
V0_8 = Upstream("v0.8.0", run_folders=False, monitors="prime_rl.utils.monitor")
MAIN = Upstream("559b447", run_folders=True, monitors="prime_rl.monitors")


def detect() -> Upstream:
    """The layout of the PRIME-RL that this interpreter would import. Raises ConfigError when there is none we know."""
    spec = importlib.util.find_spec("prime_rl")
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError(f"PRIME-RL isn't installed for {sys.executable}: install one of {TESTED} into it")
    release = installed_release()
    if release is not None and not release.startswith(KNOWN_RELEASES):
        raise _unknown(f"version {release}")
    roots = [Path(place) for place in spec.submodule_search_locations]

    def has(file: str) -> bool:
        return any((root / file).is_file() for root in roots)

    if has("monitors/__init__.py") and not has("trainer/runs.py"):
        return MAIN
    if has("trainer/runs.py") and not has("monitors/__init__.py"):
        return V0_8 if has("utils/monitor/file.py") else V0_7
    raise _unknown("of an unknown layout" if release is None else f"version {release}, with an unknown layout")


def installed_release() -> str | None:
    """What the installed package says its version is; None for a checkout on the path."""
    try:
        return importlib.metadata.version("prime-rl")
    except importlib.metadata.PackageNotFoundError:
        return None


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"this PRIME-RL is {what}, the outer loop was tested with {TESTED}: install one of these, or unset "
        "COMPOSER_PRIME_OUTER to train with the loss alone"
    )


def running_trainer() -> FrameType | None:
    """The frame of upstream's `train(config)` above the caller, whatever its module is called; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "train" and "config" in frame.f_locals and "setup_optimizer" in frame.f_globals:
            return frame
        frame = frame.f_back
    return None


def check_trainer(names: Mapping[str, Any]) -> None:
    """Raise ConfigError unless everything that the hook wraps is where it was in the versions we know."""
    missing = [name for name in TRAINER_NAMES if name not in names]
    manager = getattr(sys.modules.get(_CHECKPOINTS), "CheckpointManager", None)
    missing += [f"CheckpointManager.{name}" for name in ("save", "load", "get_ckpt_path") if not hasattr(manager, name)]
    if missing:
        raise _unknown(f"one whose trainer lacks {', '.join(missing)}")


def checkpoint_manager() -> Any:
    """Upstream's class of checkpoint managers, which its trainer has loaded."""
    return sys.modules[_CHECKPOINTS].CheckpointManager


def check_config(config: Any) -> None:
    """Raise ConfigError for settings of upstream's trainer with which no outer loop can work."""
    if getattr(config.model, "full_offload", None):
        raise ConfigError(
            "trainer.model.full_offload must be off with an outer loop, since the weights it trains lie where the "
            "outer loop can't move them: use trainer.model.optim_cpu_offload or fsdp_cpu_offload to save GPU memory"
        )
    runs = getattr(config, "max_concurrent_runs", 1)
    if runs > 1:
        raise ConfigError(
            f"trainer.max_concurrent_runs ({runs}) must be 1 with an outer loop: one trainer is one site of one run"
        )
