"""Which GPUs and ports each of several sites on one machine gets: decided before anything starts.

A PRIME-RL run takes the first GPUs it sees and fixed ports, so two on one machine need both set apart.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.errors import BadInput, ConfigError
from composer_prime.sites.embedded.ports import is_free

PORTS_PER_SITE = 200


class Ports(NamedTuple):
    """The ports of one site.

    server         the inference router, which the orchestrator talks to; beside it, its metrics at + 21000
    weights        rendezvous of the weight broadcast
    rollouts       batches from the orchestrator; also the next one
    data_parallel  vLLM's ranks
    env_servers    one for each source, from this one on
    backend        vLLM, behind the router
    """

    server: int
    weights: int
    rollouts: int
    data_parallel: int
    env_servers: int
    backend: int

    @classmethod
    def starting_at(cls, first: int) -> "Ports":
        """Those of a site whose first port this is."""
        return cls(*(first + offset for offset in (0, 10, 20, 30, 40, 100)))

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

    visible  the GPUs there are; None asks CUDA_VISIBLE_DEVICES, then torch.

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
            f"{len(visible)}: lower it or deployment.num_train_gpus and num_infer_gpus, name others in "
            "CUDA_VISIBLE_DEVICES, or start each site on a machine of its own with `composer-prime site`"
        )
    placed = {}
    for index, name in enumerate(names):
        ports = Ports.starting_at(recipe.prime_rl.first_port + index * PORTS_PER_SITE)
        _check_free(name, ports)
        placed[name] = Placement(tuple(visible[index * each : (index + 1) * each]), ports)
    return placed


def visible_gpus() -> list[str]:
    """The GPUs a process of ours would see."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _check_free(site: str, ports: Ports) -> None:
    taken = [port for port in ports.all() if not is_free(port)]
    if taken:
        raise BadInput(
            f"port {taken[0]} of site {site} is in use on this machine: stop what listens there, or move all ports "
            "with prime_rl.first_port"
        )
