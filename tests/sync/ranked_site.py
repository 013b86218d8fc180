"""Sites of several ranks for tests: each rank a process, with FSDP2 over gloo on this machine.

Parameters move by numbers that follow from their names and global places alone, so that every layout must end with the
same bits; `train` is for the tests that want gradients.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_prime.store import open_store
from composer_prime.sync.ranked_loop import RankedLoop
from composer_prime.sync.ranks import Ranks
from composer_prime.sync.site_clock import OuterLoop
from tests.forked import PROCESSES
from tests.patience import PATIENCE_S
from tests.sync.harness import make_terms

MAX_STEPS = 200


@dataclass(frozen=True)
class Plan:
    """What one site does, on each of its ranks.

    model      a key of `MODELS`
    body       what each rank does; returns what the test wants to see
    terms      for `make_terms`
    timeout_s  of the site's own group
    """

    site: str
    num_ranks: int
    uri: str
    model: str = "mlp"
    body: "Callable[[Rank], Any]" = field(default_factory=lambda: run_to_the_end)
    terms: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = PATIENCE_S


@dataclass
class Rank:
    """One rank of a site, ready to train."""

    plan: Plan
    number: int
    ranks: Ranks

    @cached_property
    def net(self) -> nn.Module:
        """The plan's model, sharded over the ranks. Collective when first asked for."""
        net = make_model(self.plan.model)
        fully_shard(net)
        return net

    def outer(self, lead: Callable[[], OuterLoop] | None = None) -> RankedLoop:
        """The outer loop, not joined yet."""
        return RankedLoop(self.ranks, lead or self.lead)

    def lead(self) -> OuterLoop:
        """What rank 0 runs."""
        return OuterLoop(open_store(self.plan.uri), make_terms(**self.plan.terms), run="run", site=self.plan.site)


def mlp() -> nn.Module:
    """Dimensions that neither 2 nor 3 ranks divide, and one that leaves ranks without any."""
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


class Tied(nn.Module):
    """An embedding tied to the head, a frozen layer, and an adapter of low rank on it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.lora_a = nn.Linear(5, 2, bias=False)
        self.lora_b = nn.Linear(2, 5, bias=False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: [n, 11]"""
        hidden = self.embed(tokens)
        return self.head(torch.tanh(self.base(hidden) + self.lora_b(self.lora_a(hidden))))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "bf16": lambda: mlp().bfloat16(), "tied": Tied}


def make_model(name: str) -> nn.Module:
    """The model, not sharded, the same in every process."""
    net = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return net


def move(net: nn.Module, step: int, site: str) -> None:
    """Add to each trainable parameter what its name, its values' places, the step and the site say."""
    with torch.no_grad():
        for number, parameter in enumerate(p for p in net.parameters() if p.requires_grad):
            places = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
            change = (0.05 * torch.sin(places * 0.7 + number + step + 10 * ord(site[0]))).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                shard = distribute_tensor(change, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().sub_(shard.to_local())
            else:
                parameter.sub_(change)


def whole(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter's values. Collective."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in net.named_parameters()
    }


def move_along(
    outer: OuterLoop | RankedLoop,
    net: nn.Module,
    site: str,
    *,
    num_ranks: int = 1,
    step: int = 0,
    last: int = MAX_STEPS,
) -> dict[str, Any]:
    """Join, move from the step after `step` to `last` or the run's end, 12 tokens a step, and leave."""
    outer.join(net.named_parameters())
    while not outer.finished and step < last:
        step += 1
        move(net, step, site)
        outer.after_inner_step(tokens=12 // num_ranks, samples=1)
    seen = {"net": whole(net), "steps": step, "state": outer.state_dict(), "summary": outer.summary()}
    outer.close()
    return seen


def run_to_the_end(rank: Rank, last: int = MAX_STEPS) -> dict[str, Any]:
    """Join, move until the run ends or the last step, and leave."""
    return move_along(rank.outer(), rank.net, rank.plan.site, num_ranks=rank.plan.num_ranks, last=last)


def run_every_model(rank: Rank) -> dict[str, dict[str, Any]]:
    """`run_to_the_end` in a run of its own for each of `MODELS`, by model."""
    plans = [replace(rank.plan, uri=f"{rank.plan.uri}/{model}", model=model) for model in MODELS]
    return {plan.model: run_to_the_end(Rank(plan, rank.number, rank.ranks)) for plan in plans}


def train_to_the_end(rank: Rank) -> dict[str, Any]:
    """As `run_to_the_end`, with gradients: AdamW on each rank's own random tokens."""
    outer = rank.outer()
    outer.join(rank.net.named_parameters())
    optimizer = torch.optim.AdamW([p for p in rank.net.parameters() if p.requires_grad], lr=0.01)
    data = torch.Generator().manual_seed(100 * ord(rank.plan.site) + rank.number)
    steps = 0
    while not outer.finished and steps < MAX_STEPS:
        tokens = torch.randint(11, (16,), generator=data)
        nn.functional.cross_entropy(rank.net(tokens), (tokens * 3 + 1) % 11).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        outer.after_inner_step(tokens=16, samples=1)
    seen = {"net": whole(rank.net), "steps": steps, "summary": outer.summary()}
    outer.close()
    return seen


def _be_rank(plan: Plan, number: int, folder: str) -> None:
    """A rank's whole process."""
    torch.set_num_threads(1)
    meeting, place = Path(folder) / f"{plan.site}.meeting", Path(folder) / f"{plan.site}.{number}"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=number,
        world_size=plan.num_ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    seen: Any
    try:
        ranks = Ranks(plan.timeout_s)
        ranks.exchange()  # all are connected before one may end
        seen = plan.body(Rank(plan, number, ranks))
    except Exception as error:
        seen = error
    part = place.with_name(f"{place.name}.part")
    torch.save(seen, part)
    os.replace(part, place)
    dist.destroy_process_group()


def run_ranked(folder: Path, *plans: Plan, timeout_s: float = PATIENCE_S) -> list[list[Any]]:
    """Run sites at once; by site and rank what each saw: its body's result, its error, or None when it was killed."""
    processes = [
        PROCESSES.Process(target=_be_rank, args=(plan, number, str(folder)), daemon=True)
        for plan in plans
        for number in range(plan.num_ranks)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        assert not any(process.is_alive() for process in processes), f"ranks still run after {timeout_s} s"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [[_seen(folder / f"{plan.site}.{number}") for number in range(plan.num_ranks)] for plan in plans]


def _seen(place: Path) -> Any:
    return torch.load(place, weights_only=False) if place.exists() else None
