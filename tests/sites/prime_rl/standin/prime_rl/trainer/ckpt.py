"""The stand-in's checkpoints: a folder for each step, one file a rank in it."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass
class Progress:
    """The step that is being trained, from 1."""

    step: int = 1


class CheckpointManager:
    """Saves and loads; the calls are upstream's."""

    def __init__(self, output_dir: Path, keep_last: int | None) -> None:
        self.folder = output_dir / "checkpoints"
        self.keep_last = keep_last

    def steps(self) -> list[int]:
        """Those that have a folder, in order."""
        return sorted(int(path.name.removeprefix("step_")) for path in self.folder.glob("step_*"))

    def get_ckpt_path(self, step: int) -> Path:
        """The trainer's folder in that of a step."""
        return self.folder / f"step_{step}" / "trainer"

    def save(self, step: int, model: nn.Module, optimizers: list[Any], scheduler: Any, progress: Progress) -> None:
        """Every rank its own shards."""
        state = {
            "model": [local(parameter) for parameter in model.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "scheduler": scheduler.state_dict(),
            "progress": asdict(progress),
        }
        path = self.get_ckpt_path(step)
        path.mkdir(parents=True, exist_ok=True)
        with (path / f"rank_{dist.get_rank()}.pt").open("wb") as file:
            torch.save(state, file)
        dist.barrier()
        if dist.get_rank() == 0:
            (path / ".metadata.tmp").touch()
            (path / ".metadata.tmp").rename(path / ".metadata")

    def maybe_clean(self, step: int) -> None:
        """Delete what is older than the last ones, this step's among them, that are kept."""
        if self.keep_last is not None and dist.get_rank() == 0:
            for old in [other for other in self.steps() if other <= step][: -self.keep_last]:
                shutil.rmtree(self.folder / f"step_{old}")

    def load(
        self,
        step: int,
        model: nn.Module,
        optimizers: list[Any],
        scheduler: Any,
        progress: Progress,
        path: Path | None = None,
    ) -> None:
        """What `save` wrote, in place."""
        state = torch.load((path or self.get_ckpt_path(step)) / f"rank_{dist.get_rank()}.pt", weights_only=False)
        with torch.no_grad():
            for parameter, saved in zip(model.parameters(), state["model"], strict=True):
                local(parameter).copy_(saved)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        scheduler.load_state_dict(state["scheduler"])
        progress.step = state["progress"]["step"]


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
