"""A trainer whose ranks are processes on this machine, started as torchrun would start them."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_prime.sites.embedded.ports import claim_port
from composer_prime.store import open_store
from composer_prime.sync.founding import FoundingRecord, announce
from tests.forked import Program
from tests.patience import PATIENCE_S
from tests.sync.harness import make_terms

REPOSITORY = Path(__file__).parents[3]
Process = subprocess.Popen[bytes] | Program
HOOKED = "composer_prime.sites.prime_rl.loss.composer_loss"
WRAPPED = "composer_prime.sites.prime_rl.outer.loss"
OWN = "tests.sites.prime_rl.own_losses"
PLAIN = "composer_prime.losses.composer.composer_loss"

TERMS: dict[str, Any] = {"inner_steps": 4, "fragments": 1, "sync_delay": 0, "rounds": 2, "grace_s": 30.0}
"""A run of two rounds, adopted at the step at which they are offered."""


@dataclass
class Launched:
    """One site's trainer: its folder, its number of ranks, and what its environment adds to ours.

    within   a module, with its arguments, that runs the trainer's in its place
    """

    folder: Path
    num_ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)
    timeout_s: float = PATIENCE_S
    within: tuple[str, ...] = field(default=(), kw_only=True)
    _processes: list[Process] = field(default_factory=list)

    def launch(self, module: str, arguments: list[str], path: list[Path]) -> None:
        """Start every rank as `python -m module *arguments`, with `path` to import from."""
        module, *arguments = [*self.within, module, *arguments]
        self._processes = []
        for rank, environment in enumerate(self.environments(path)):
            self._processes.append(self._start(module, arguments, environment, self.log(rank)))

    def environments(self, path: list[Path]) -> list[dict[str, str]]:
        """The environment of each rank, as torchrun would make it; the folder's own is made if need be."""
        port = claim_port(None, set())  # one that no outgoing connection takes meanwhile
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSER_PRIME_")}
        common = (
            inherited
            | self.env
            | {
                "PYTHONPATH": os.pathsep.join([*map(str, [*path, REPOSITORY]), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(self.num_ranks),
                "LOCAL_WORLD_SIZE": str(self.num_ranks),
            }
        )
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.num_ranks)]

    def _start(self, module: str, arguments: list[str], environment: dict[str, str], log: Path) -> Process:
        with log.open("wb") as output:
            command = [sys.executable, "-m", module, *arguments]
            return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def log(self, rank: int) -> Path:
        """What a rank prints; beside its folder, so that this holds what the trainer makes and nothing else."""
        return self.folder.with_name(f"{self.folder.name}.rank_{rank}.log")

    def wait(self) -> tuple[int, str]:
        """(exit code of rank 0, what rank 0 printed), once all ranks have ended."""
        try:
            for process in self._processes:
                process.wait(self.timeout_s)
        finally:
            self.kill()
        code = self._processes[0].returncode
        assert code is not None
        return code, self.output()

    def finish(self) -> str:
        """Wait for an orderly end; what rank 0 printed."""
        code, output = self.wait()
        assert code == 0, output
        return output

    def output(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        return self.log(rank).read_text(errors="replace")

    def has_ended(self) -> bool:
        """Whether rank 0 runs no more."""
        return self._processes[0].poll() is not None

    def kill(self) -> None:
        """kill -9 to what is still running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def announced(bucket: Path | str, **terms: Any) -> str:
    """A run in a new bucket, without masters yet; its URI."""
    store = open_store(str(bucket))
    announce(store, FoundingRecord(run="run", terms=make_terms(**TERMS | terms)))
    store.close()
    return str(bucket)


def outer_env(uri: str, name: str) -> dict[str, str]:
    """What makes a trainer the site `name` of the run at `uri`."""
    return {"COMPOSER_PRIME_OUTER": uri, "COMPOSER_PRIME_SITE": name}
