"""Starts stand-in trainers as torchrun would, and reads what they left."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from composer_prime.store import open_store
from composer_prime.sync.founding import FoundingRecord, announce
from tests.sync.harness import make_terms

STANDIN = Path(__file__).parent / "standin"
REPOSITORY = Path(__file__).parents[3]
HOOKED = "composer_prime.sites.prime_rl.loss.composer_loss"
PLAIN = "composer_prime.losses.composer.composer_loss"
TIMEOUT_S = 120

CONFIG: dict[str, Any] = {
    "loss": HOOKED,
    "max_steps": 8,
    "ckpt_interval": 4,
    "die_at_step": None,
    "resume": None,
    "dist_timeout_seconds": 240,
    "model": {"seed": 0, "width": 6, "adapters_only": False, "full_offload": None},
    "optim": {"lr": 0.01},
    "data": {"seed": 0},
}
"""What a stand-in trainer takes; tests override keys, and keys of its tables."""

TERMS: dict[str, Any] = {"inner_steps": 4, "fragments": 1, "sync_delay": 0, "rounds": 2, "grace_s": 30.0}
"""A run of two rounds, adopted at the step at which they are offered."""


@dataclass
class Trainer:
    """One site's trainer: its ranks are processes of their own."""

    folder: Path
    num_ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    path: tuple[Path, ...] = ()
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, **changes: Any) -> "Trainer":
        """Start every rank, with these changes to the configuration."""
        config = {"output_dir": str(self.folder)} | CONFIG
        for key, value in (self.config | changes).items():
            config[key] = config[key] | value if isinstance(value, dict) else value
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSER_PRIME_")}
        path = os.pathsep.join(map(str, (*self.path, STANDIN, REPOSITORY)))
        common = (
            inherited
            | self.env
            | {
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(self.num_ranks),
            }
        )
        command = [sys.executable, "-m", "prime_rl.trainer.rl.train", repr(config)]
        self._processes = [
            subprocess.Popen(
                command,
                env=common | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(self.num_ranks)
        ]
        return self

    def wait(self) -> tuple[int, str]:
        """(exit code of rank 0, what rank 0 printed), once all ranks have ended."""
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in self._processes]
        finally:
            self.kill()
        return self._processes[0].returncode, outputs[0]

    def finish(self) -> str:
        """Wait for an orderly end; what rank 0 printed."""
        code, output = self.wait()
        assert code == 0, output
        return output

    def kill(self) -> None:
        """End what is still running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def broadcast(self, step: int) -> dict[str, Tensor]:
        """The weights that went to inference after a step."""
        return load_file(self.folder / "broadcasts" / f"step_{step}.safetensors")


def announced(bucket: Path, **terms: Any) -> str:
    """A run in a new bucket, without masters yet; its URI."""
    store = open_store(str(bucket))
    announce(store, FoundingRecord(run="run", terms=make_terms(**TERMS | terms)))
    store.close()
    return str(bucket)


def site(folder: Path, name: str, uri: str, num_ranks: int = 1, **config: Any) -> Trainer:
    """A trainer that takes part in the run at `uri`, on data of its own."""
    env = {"COMPOSER_PRIME_OUTER": uri, "COMPOSER_PRIME_SITE": name}
    return Trainer(folder / name, num_ranks, env, {"data": {"seed": ord(name[0])}} | config)
