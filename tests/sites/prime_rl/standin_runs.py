"""Starts stand-in trainers, and reads what they left."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.forked import Program
from tests.sites.prime_rl.launched import HOOKED, Launched, outer_env

STANDIN = Path(__file__).parent / "standin"

CONFIG: dict[str, Any] = {
    "loss": {"type": "custom", "import_path": HOOKED, "kwargs": {}},
    "env_vars": {},
    "max_steps": 8,
    "ckpt_interval": 4,
    "keep_last": None,
    "log_times": False,
    "die_at_step": None,
    "resume": None,
    "resume_dir": None,
    "dist_timeout_seconds": 240,
    "model": {"seed": 0, "width": 6, "adapters_only": False, "fusions": True, "full_offload": None},
    "optim": {"lr": 0.01},
    "data": {"seed": 0},
}
"""What a stand-in trainer takes; tests override keys, and keys of its tables."""


@dataclass
class Trainer(Launched):
    """A stand-in with its own configuration, and folders to import from before its own."""

    config: dict[str, Any] = field(default_factory=dict)
    path: tuple[Path, ...] = ()

    def start(self, **changes: Any) -> "Trainer":
        """Start every rank, with these changes to the configuration."""
        self.launch("prime_rl.trainer.rl.train", [repr(self.resolved(**changes))], [*self.path, STANDIN])
        return self

    def resolved(self, **changes: Any) -> dict[str, Any]:
        """The whole configuration, with these changes."""
        config: dict[str, Any] = {"output_dir": str(self.folder)} | CONFIG
        for key, value in (self.config | changes).items():
            whole = not isinstance(value, dict) or "type" in value
            config[key] = value if whole else config[key] | value
        return config

    def _start(self, module: str, arguments: list[str], environment: dict[str, str], log: Path) -> Program:
        return Program(module, arguments, environment, log)

    def broadcast(self, step: int) -> dict[str, Tensor]:
        """The weights that went to inference after a step."""
        return load_file(self.folder / "broadcasts" / f"step_{step}.safetensors")


def site(folder: Path, name: str, uri: str, num_ranks: int = 1, **config: Any) -> Trainer:
    """A trainer that takes part in the run at `uri`, on data of its own."""
    data = {"data": {"seed": ord(name[0])}}
    return Trainer(folder / name, num_ranks, outer_env(uri, name), config=data | config)
