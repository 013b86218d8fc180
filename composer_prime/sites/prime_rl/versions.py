"""What our code needs of PRIME-RL's trainer, and what differs between its versions there.

A version's number proves nothing: names, signatures and records are looked at. Nothing of upstream is imported here;
the trainer that is running is found on the stack of who imports our loss.
"""

import asyncio
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from composer_prime.errors import ConfigError

TESTED = "v0.8.0 and commit 559b447 (v0.8.1.dev67)"
"""The versions of PRIME-RL that the tests with the marker `prime_rl` ran against."""

INPUTS = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
"""The fields of a loss's inputs that every loss reads."""
CONFIG = ("model", "loss", "output_dir", "max_steps", "dist_timeout_seconds")
BATCH = ("loss_mask", "sequence_lengths")
LOADERS = ("DataLoader", "FakeDataLoader")

LOSS_MODULE = "prime_rl.trainer.rl.loss"
_CHECKPOINTS = "prime_rl.trainer.ckpt"


@dataclass(frozen=True)
class Upstream:
    """One layout of PRIME-RL.

    name         the version or commit that stands for it
    run_folders  whether a run's folder is named for `run.name`, and its monitors are coroutines; neither was so before
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


V0_8 = Upstream("v0.8.0", run_folders=False, monitors="prime_rl.utils.monitor")
MAIN = Upstream("559b447", run_folders=True, monitors="prime_rl.monitors")


def detect() -> Upstream:
    """The layout of the PRIME-RL that this interpreter would import, told by its files.

    Raises ConfigError when there is none, or none with metric monitors where we know them.
    """
    spec = importlib.util.find_spec("prime_rl")
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError(f"PRIME-RL isn't installed for {sys.executable}: install one of {TESTED} into it")
    roots = [Path(place) for place in spec.submodule_search_locations]

    def has(file: str) -> bool:
        return any((root / file).is_file() for root in roots)

    if has("monitors/__init__.py"):
        return MAIN
    if has("utils/monitor/__init__.py"):
        return V0_8
    raise _lacking(["metric monitors (prime_rl.monitors or prime_rl.utils.monitor)"])


def remedy() -> str:
    """What to do about an installation that can't be used."""
    return f"install one that was tested ({TESTED}), or name no outer run, to train with the loss alone"


def _lacking(missing: list[str]) -> ConfigError:
    try:
        release = f"version {importlib.metadata.version('prime-rl')}"
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        release = "of no version"
    return ConfigError(f"this PRIME-RL ({release}) lacks {', '.join(missing)}, which composer-prime needs: {remedy()}")


def running_trainer() -> FrameType | None:
    """The frame of upstream's trainer among our callers, whatever it is called; None where its loss calls nobody.

    It is the first caller outside upstream's module of losses, which imports our loss and calls it.
    """
    frame, in_losses = sys._getframe(1), False
    while frame is not None:
        if frame.f_globals.get("__name__") == LOSS_MODULE:
            in_losses = True
        elif in_losses:
            return frame
        frame = frame.f_back
    return None


def config_of(frame: FrameType) -> Any:
    """The configuration that the trainer's module works by, in this frame or a caller of it; None: there is none."""
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_globals is frame.f_globals and "config" in caller.f_locals:
            return caller.f_locals["config"]
        caller = caller.f_back
    return None


def is_loaded() -> bool:
    """Whether some PRIME-RL's trainer runs in this process, however it is made."""
    return any(name.startswith("prime_rl.trainer") for name in sys.modules)


def check_trainer(frame: FrameType, upstream: Upstream) -> None:
    """Raise ConfigError that names what the trainer that runs in `frame` lacks."""
    missing = [piece for piece, there in _pieces(frame, upstream) if not there]
    if missing:
        raise _lacking(missing)


def _pieces(frame: FrameType, upstream: Upstream) -> Iterator[tuple[str, bool]]:
    names, code = frame.f_globals, frame.f_code
    yield f"config in {code.co_name}", "config" in frame.f_locals
    yield f"progress in {code.co_name}", "progress" in (*code.co_varnames, *code.co_cellvars)
    for name in CONFIG:
        yield f"config.{name}", hasattr(frame.f_locals.get("config"), name)
    yield "setup_optimizer(named_params)", _takes(names.get("setup_optimizer"), "named_params")
    yield "setup_scheduler", callable(names.get("setup_scheduler"))
    for name in dict.fromkeys((LOADERS[0], *loaders(names))):
        loader = names.get(name)
        yield f"{name}(dp_world_size)", isinstance(loader, type) and _takes(loader, "dp_world_size")
        yield f"{name}.get_batch", hasattr(loader, "get_batch")
    for name in ("save", "load", "get_ckpt_path"):
        yield f"CheckpointManager.{name}(step)", _takes(getattr(checkpoint_manager(), name, None), "step")
    yield f"LossInputs({', '.join(INPUTS)})", {*INPUTS} <= {*record_fields("LossInputs")}
    yield "LossOutputs(loss, metrics)", _is_made_of("LossOutputs", {"loss", "metrics"})
    monitors = sys.modules.get(upstream.monitors)
    if upstream.run_folders:
        log = getattr(monitors, "log", None)
        yield f"{upstream.monitors}.log(step)", _takes(log, "step") and inspect.iscoroutinefunction(log)
    else:
        yield f"{upstream.monitors}.get_monitor", callable(getattr(monitors, "get_monitor", None))


def loaders(names: Mapping[str, Any]) -> list[str]:
    """Which data loaders the trainer's module has; it makes one of them."""
    return [name for name in LOADERS if name in names]


def _takes(function: Any, parameter: str) -> bool:
    return callable(function) and parameter in inspect.signature(function).parameters


def record_fields(record: str) -> list[str]:
    """The fields of a record of upstream's losses; none where there is no such record, or no PRIME-RL."""
    found = getattr(sys.modules.get(LOSS_MODULE), record, None)
    return [field.name for field in fields(found)] if is_dataclass(found) else []


def _is_made_of(record: str, given: set[str]) -> bool:
    """Whether a record of upstream's losses can be made of these fields alone."""
    found: Any = getattr(sys.modules.get(LOSS_MODULE), record, None)
    if not is_dataclass(found):
        return False
    needed = {field.name for field in fields(found) if {field.default, field.default_factory} == {MISSING}}
    return needed <= given <= {*record_fields(record)}


def progress_of(frame: FrameType) -> Any:
    """The trainer's counters, which exist once it makes its data loader. Raises ConfigError where they don't."""
    progress = frame.f_locals.get("progress")
    if not hasattr(progress, "step"):
        raise _lacking(["progress.step before its DataLoader"])
    return progress


def check_batch(batch: Any) -> None:
    """Raise ConfigError unless a micro batch has what tells how much is trained."""
    missing = [f"{name} in its batches" for name in BATCH if name not in batch]
    if missing:
        raise _lacking(missing)


def checkpoint_manager() -> Any:
    """Upstream's class of checkpoint managers, which its trainer has loaded; None where there is none."""
    return getattr(sys.modules.get(_CHECKPOINTS), "CheckpointManager", None)


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
