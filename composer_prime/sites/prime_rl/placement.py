"""Which GPUs and ports each of several sites on one machine gets: decided before anything starts.

A PRIME-RL run takes the first GPUs it sees and fixed ports, so two on one machine need both set apart.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.errors import BadInput, ConfigError
from composer_prime.sites.embedded.ports import is_free

PORTS_PER_SITE = 200
_LISTING_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Ports:
    """The ports of one site, from `first` on.

    server         the inference router, which the orchestrator talks to; beside it, its metrics at + 21000
    weights        rendezvous of the weight broadcast
    rollouts       batches from the orchestrator; also the next one
    data_parallel  vLLM's ranks
    env_servers    one for each source, from this one on
    backend        vLLM, behind the router
    """

    first: int

    @property
    def server(self) -> int:
        return self.first

    @property
    def weights(self) -> int:
        return self.first + 10

    @property
    def rollouts(self) -> int:
        return self.first + 20

    @property
    def data_parallel(self) -> int:
        return self.first + 30

    @property
    def env_servers(self) -> int:
        return self.first + 40

    @property
    def backend(self) -> int:
        return self.first + 100

    def all(self) -> tuple[int, ...]:
        """Those that something listens on as soon as the site starts."""
        return (self.server, self.weights, self.rollouts, self.rollouts + 1, self.env_servers, self.backend)


@dataclass(frozen=True)
class Placement:
    """What one site gets of this machine; None: as it finds it.

    gpus   values for CUDA_VISIBLE_DEVICES
    ports  its own
    """

    gpus: tuple[str, ...] | None = None
    ports: Ports | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What its processes start with."""
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


def place_sites(recipe: PrimeRecipe, visible: Sequence[str] | None = None) -> dict[str, Placement]:
    """Where each site of a local run goes. One site, or sites that SLURM places, take the machine as it is.

    visible  the GPUs there are; None asks CUDA_VISIBLE_DEVICES, then nvidia-smi.

    Raises ConfigError when there are too few GPUs, BadInput when a port is in use.
    """
    names = recipe.site_names
    if len(names) == 1 or recipe.upstream.get("slurm") is not None:
        return {name: Placement() for name in names}
    each = recipe.layout.total
    visible = visible_gpus() if visible is None else visible
    if len(visible) < each * len(names):
        raise ConfigError(
            f"sites.count ({len(names)}) at {each} GPUs a site needs {each * len(names)}, and this machine shows "
            f"{len(visible)}: lower it or deployment.num_train_gpus and num_infer_gpus, or start each site on a "
            "machine of its own with `composer-prime site`"
        )
    placed = {}
    for index, name in enumerate(names):
        ports = Ports(recipe.prime_rl.first_port + index * PORTS_PER_SITE)
        _check_free(name, ports)
        placed[name] = Placement(tuple(visible[index * each : (index + 1) * each]), ports)
    return placed


def visible_gpus() -> list[str]:
    """The GPUs a process of ours would see. Raises ConfigError where nothing says so."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip()]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise ConfigError(
            "this machine's GPUs can't be counted, there is no nvidia-smi: set CUDA_VISIBLE_DEVICES to those that the "
            "sites shall share, such as 0,1,2,3"
        )
    command = [tool, "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LISTING_TIMEOUT_S)
    if done.returncode != 0:
        raise ConfigError(
            f"nvidia-smi can't list this machine's GPUs ({done.stderr.strip() or done.stdout.strip()}): repair the "
            "driver, or set CUDA_VISIBLE_DEVICES"
        )
    return done.stdout.split()


def _check_free(site: str, ports: Ports) -> None:
    taken = [port for port in ports.all() if not is_free(port)]
    if taken:
        raise BadInput(
            f"port {taken[0]} of site {site} is in use on this machine: stop what listens there, or move all ports "
            "with prime_rl.first_port"
        )
