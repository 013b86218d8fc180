"""The steps of PRIME-RL's unmodified trainer, for who wants to act after each: the outer loop, and `on_step`'s callers.

Upstream imports the loss before it makes optimizer, scheduler and data loader, so an import can wrap those names in
the trainer's own module: `Trainer` says which. In the first step each must be called once, in the order that we know.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from composer_prime.errors import ConfigError
from composer_prime.sites.prime_rl import versions
from composer_prime.sites.prime_rl.saying import ending_in_one_line, rank, show_our_log
from composer_prime.waiting import Waits

Function = Callable[..., Any]

ORDER = ("setup_optimizer", "setup_scheduler", "DataLoader", "DataLoader.get_batch", "scheduler.step")
"""What upstream's trainer calls up to the end of its first step; FakeDataLoader may stand for DataLoader."""
_FIRST_BATCH = ORDER.index("DataLoader.get_batch") + 1
_KEPT = "__composer_prime__"
"""Where a trainer's module keeps its `Trainer`: one for each process, whoever imports us first."""


@dataclass(frozen=True)
class Step:
    """One training step that has just been made, as each rank sees it: after the optimizer, before the broadcast.

    number      upstream's count, from 1
    is_last     whether the trainer stops after it
    tokens, samples   that this rank has trained in it
    parameters  what is trained, by name; shards of this rank (DTensor) where there are several
    log         `log({"name": 1.0})`: metrics for upstream's own monitors, under this step
    """

    number: int
    is_last: bool
    tokens: int
    samples: int
    parameters: Mapping[str, nn.Parameter]
    log: Callable[[Mapping[str, float]], None]


def on_step(function: Callable[[Step], object]) -> Callable[[Step], object]:
    """Call `function` after each training step, on every rank, in the order in which they were given; returns it.

    To be called (or used as a decorator) while PRIME-RL's trainer imports its loss: at the top of the loss's module.
    An exception of the function ends the trainer. The outer loop's turn comes first.

    Raises ConfigError elsewhere, and ends the trainer with one line where this PRIME-RL isn't as we know it.
    """
    frame = versions.running_trainer()
    if frame is None:
        raise ConfigError(
            f"on_step({getattr(function, '__name__', function)}) was called outside PRIME-RL's trainer: call it at the "
            "top of the module that trainer.loss.import_path, or inner, names"
        )
    with ending_in_one_line():
        Trainer.of(frame).on_step.append(function)
    return function


class Trainer:
    """The wrapped names of one trainer process.

    setup_optimizer   remembers the parameters
    DataLoader        calls `on_loader`: the checkpoint is loaded then, and nothing is broadcast yet
    its get_batch     counts the trained tokens
    scheduler.step    calls `on_step`, after the optimizer and before broadcast and checkpoint
    """

    def __init__(self, frame: FrameType, upstream: versions.Upstream) -> None:
        self.config = frame.f_locals["config"]
        self.upstream = upstream
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self.on_loader: list[Callable[[], None]] = []
        self.on_step: list[Callable[[Step], object]] = []
        self.progress: Any = None
        self.joined = False
        self.waits = Waits()
        self._frame: FrameType | None = frame
        self._called = 0
        self._tokens = self._samples = 0
        self._counts = True

    @classmethod
    def found(cls, frame: FrameType) -> "Trainer | None":
        """The one of the trainer that runs in `frame`, where somebody has made one."""
        return frame.f_globals.get(_KEPT)

    @classmethod
    def of(cls, frame: FrameType) -> "Trainer":
        """The one of the trainer that runs in `frame`; makes it. Raises ConfigError where a piece of it is missing."""
        kept = cls.found(frame)
        if kept is None:
            upstream = versions.detect()
            versions.check_trainer(frame, upstream)
            show_our_log()
            kept = frame.f_globals[_KEPT] = cls(frame, upstream)
            kept._wrap(frame.f_globals)
        return kept

    def check_first_batch(self) -> None:
        """For the loss: raise ConfigError unless all that comes before it was called as we know it."""
        if self._called < _FIRST_BATCH:
            raise _broken("the loss", ORDER[self._called])

    def _wrap(self, names: dict[str, Any]) -> None:
        """Put ourselves between the trainer's module and what it calls."""
        names["setup_optimizer"] = self._remembering(names["setup_optimizer"])
        names["setup_scheduler"] = self._stepping(names["setup_scheduler"])
        for name in versions.loaders(names):
            names[name] = self._loading_data(names[name])

    def _note(self, name: str, after: Sequence[str] = ()) -> None:
        """Check the first step's order, on this rank: each is called once, when it is due. Ends the trainer.

        after   what should have come before as well
        """
        if self._called == len(ORDER):
            return
        missed = after if name == ORDER[self._called] else [ORDER[self._called]]
        with ending_in_one_line(every_rank=True):
            if missed:
                raise _broken(name, missed[0])
        self._called += 1

    def _remembering(self, setup: Function) -> Function:
        @functools.wraps(setup)
        def setup_optimizer(*args: Any, **kwargs: Any) -> Any:
            from composer_prime.outer.fragments import trainable

            self._note("setup_optimizer")
            made = setup(*args, **kwargs)
            named = inspect.signature(setup).bind(*args, **kwargs).arguments["named_params"]
            self.parameters = list(trainable(named))  # type: ignore[arg-type]
            return made

        return setup_optimizer

    def _stepping(self, setup: Function) -> Function:
        @functools.wraps(setup)
        def setup_scheduler(*args: Any, **kwargs: Any) -> Any:
            self._note("setup_scheduler")
            scheduler = setup(*args, **kwargs)
            base = type(scheduler)

            def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
                self._note("scheduler.step", after=() if _optimizer_has_stepped(scheduler) else ("optimizer.step",))
                base.step(scheduler, *args, **kwargs)
                self._after_step()

            # A class of its own: an attribute of the instance would go into checkpoints.
            scheduler.__class__ = type(base.__name__, (base,), {"step": step})
            return scheduler

        return setup_scheduler

    def _loading_data(self, loader: type[Any]) -> type[Any]:
        trainer, signature = self, inspect.signature(loader)

        class WatchedLoader(loader):
            """Upstream's loader, which says when it is made, and counts what it gives."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                trainer._before_loader(signature.bind(*args, **kwargs).arguments["dp_world_size"])
                super().__init__(*args, **kwargs)

            def get_batch(self) -> list[Any]:
                trainer.waits.say("batch", "a batch of PRIME-RL's orchestrator, see its log")
                batches = super().get_batch()
                trainer.waits.say("batch", None)
                trainer._note("DataLoader.get_batch")
                trainer._count(batches)
                return batches

        return WatchedLoader

    def _before_loader(self, dp_world_size: int) -> None:
        import torch.distributed as dist

        self._note("DataLoader")
        assert self._frame is not None, "the first step's order has been checked"
        with ending_in_one_line(every_rank=True):
            self.progress = versions.progress_of(self._frame)
        self._frame = None  # it holds the model
        ranks_per_batch = dist.get_world_size() // dp_world_size
        self._counts = dist.get_rank() % ranks_per_batch == 0  # context-parallel ranks get the same batch
        for function in self.on_loader:
            function()

    def _count(self, batches: list[Any]) -> None:
        if not self._counts:
            return
        for batch in batches:
            with ending_in_one_line(every_rank=True):
                versions.check_batch(batch)
            self._tokens += int(trained_tokens(batch).sum())
            self._samples += len(batch["sequence_lengths"])

    def _after_step(self) -> None:
        """Everybody's turn, on all ranks."""
        (tokens, samples), self._tokens, self._samples = (self._tokens, self._samples), 0, 0
        number, max_steps = self.progress.step, self.config.max_steps
        is_last = max_steps is not None and number >= max_steps
        log = functools.partial(self.upstream.log, step=number)
        step = Step(number, is_last, tokens, samples, dict(self.parameters), log)
        for function in self.on_step:
            function(step)


def _broken(name: str, missed: str) -> ConfigError:
    return ConfigError(
        f"this PRIME-RL's trainer came to {name} on rank {rank()} without calling {missed} first, which composer-prime "
        f"waits for: {versions.remedy()}"
    )


def _optimizer_has_stepped(scheduler: Any) -> bool:
    """As torch's schedulers know it, who watch their optimizer; True where this one doesn't."""
    optimizer = getattr(scheduler, "optimizer", None)
    watched = hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")
    return not watched or getattr(optimizer, "_opt_called", False)


def trained_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Which tokens of a micro batch any part of upstream's loss trains, as upstream counts them: bool, as its mask."""
    import torch

    trained = batch["loss_mask"].to(torch.bool)
    if batch.get("rl_weights") is not None:
        trained = trained & (batch["rl_weights"] != 0)
    for name in ("ce_weights", "ref_kl_weights"):
        weights = batch.get(name)
        if weights is not None:
            trained = trained | (weights != 0)
    return trained
