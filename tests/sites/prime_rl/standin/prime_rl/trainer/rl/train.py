"""A trainer of our own in upstream's order of calls, for tests that have no PRIME-RL: run as its module is run there.

Its batches are random numbers that follow from a seed and the step, its model is tiny, its ranks share it by FSDP2.
"""

import asyncio
import os
import signal
import sys
import time
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from prime_rl import monitors
from prime_rl.trainer.ckpt import CheckpointManager, Progress
from prime_rl.trainer.rl.loss import LossConfig, LossInputs, compute_loss, setup_rl_loss_fn
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

VOCABULARY, WIDTH, LENGTH = 11, 6, 12


class Block(nn.Module):
    """A gated layer; by `model.fusions`, which is on by default, both projections are one parameter."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        gate, up = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        if fused:
            self.gate_up_proj = nn.Parameter(torch.cat([gate.weight, up.weight]).detach())
        else:
            self.gate_proj, self.up_proj = gate, up

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same either way."""
        if hasattr(self, "gate_up_proj"):
            gate, up = nn.functional.linear(hidden, self.gate_up_proj).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        return torch.tanh(gate) * (1 + up)


class Policy(nn.Module):
    """Two blocks between an embedding and a head; dimensions that two ranks don't divide."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, fused) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits: [n, VOCABULARY]"""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def setup_model(config: Any) -> nn.Module:
    """The same initial weights at every site, sharded over the ranks."""
    torch.manual_seed(config.model.seed)
    model = Policy(config.model.width, config.model.fusions)
    if config.model.adapters_only:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers" in name)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def setup_optimizer(
    config: Any, named_params: list[tuple[str, nn.Parameter]], parallel_dims: Any
) -> tuple[torch.optim.Optimizer, None]:
    """AdamW, and no gradient manager."""
    trained = [parameter for _, parameter in named_params if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=config.lr), None


def setup_scheduler(optimizer: torch.optim.Optimizer, config: Any, max_steps: int | None, lr: float) -> LRScheduler:
    """A constant rate."""
    return ConstantLR(optimizer, factor=1.0)


class FakeDataLoader:
    """Random batches."""

    def __init__(self, config: Any, seq_len: int, dp_world_size: int) -> None:
        self.config, self.seq_len = config, seq_len
        self.step = config.start_step

    def wait_for_batch(self) -> None:
        """They are there."""

    def get_batch(self) -> list[dict[str, Any]]:
        """One micro batch of two sequences, by the seed, the step and the rank."""
        self.step += 1
        generator = torch.Generator().manual_seed(1000 * self.config.seed + 10 * self.step + dist.get_rank())
        return [
            {
                "input_ids": torch.randint(VOCABULARY, (1, self.seq_len), generator=generator),
                "advantages": torch.randn(1, self.seq_len, generator=generator),
                "inference_logprobs": -torch.rand(1, self.seq_len, generator=generator) - 1.5,
                "loss_mask": torch.rand(1, self.seq_len, generator=generator) < 0.7,
                "sequence_lengths": [self.seq_len // 2, self.seq_len - self.seq_len // 2],
                "ref_logprobs": -torch.rand(1, self.seq_len, generator=generator) - 1.5,
                "sampling_mask": torch.randint(VOCABULARY, (1, self.seq_len, 3), generator=generator),
                "ce_weights": None,
                "ref_kl_weights": None,
            }
        ]


class DataLoader(FakeDataLoader):
    """Upstream's other loader; here the same."""


def broadcast_weights(model: nn.Module, folder: Path, step: int) -> None:
    """Every parameter whole, as inference would load it."""
    whole = {name: full(parameter) for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(whole, folder / f"step_{step}.safetensors")


def full(parameter: torch.Tensor) -> torch.Tensor:
    """All values of a parameter."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def clean_exit(function: Any) -> Any:
    """Leave the process group whatever happens, and end with code 1 on an error."""

    @wraps(function)
    def wrapper(config: Any) -> None:
        try:
            function(config)
        except Exception as error:
            print(f"Fatal error in {function.__name__}: {error!r}", file=sys.stderr)
            sys.exit(1)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return wrapper


@clean_exit
def train(config: Any) -> None:
    """Upstream's order: model, loss, optimizer, scheduler, checkpoint, loader, first broadcast, steps."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        monitors.FILE.append(config.output_dir / "metrics.jsonl")
    ckpt_manager = CheckpointManager(config.output_dir, config.keep_last)
    model = setup_model(config)
    rl_loss_fn = setup_rl_loss_fn(config.loss)
    optimizer, _ = setup_optimizer(config.optim, list(model.named_parameters()), None)
    scheduler = setup_scheduler(optimizer, None, config.max_steps, config.optim.lr)
    progress = Progress()
    if config.resume is not None:
        step = ckpt_manager.steps()[-1] if config.resume == -1 else config.resume
        path = None if config.resume_dir is None else Path(config.resume_dir) / f"step_{step}" / "trainer"
        ckpt_manager.load(step, model, [optimizer], scheduler, progress, path=path)
        progress.step += 1
    config.data.start_step = progress.step - 1
    dataloader = FakeDataLoader(config.data, LENGTH, dist.get_world_size())
    broadcasts = config.output_dir / "broadcasts"
    broadcast_weights(model, broadcasts, progress.step - 1)
    while True:
        dataloader.wait_for_batch()
        batches = dataloader.get_batch()
        forward_backward_start_time = time.perf_counter()
        for batch in batches:
            learn(model, rl_loss_fn, batch)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        forward_backward_time = time.perf_counter() - forward_backward_start_time
        broadcast_weights(model, broadcasts, progress.step)
        if progress.step % config.ckpt_interval == 0:
            ckpt_manager.save(progress.step, model, [optimizer], scheduler, progress)
            ckpt_manager.maybe_clean(progress.step)
        if config.log_times:
            asyncio.run(monitors.log({"time/forward_backward": forward_backward_time}, step=progress.step))
        if progress.step == config.die_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if progress.step == config.max_steps:
            break
        progress.step += 1


def learn(model: nn.Module, rl_loss_fn: Any, batch: dict[str, Any]) -> None:
    """Forward and backward of one micro batch, the loss called for each sequence."""
    tokens = batch["input_ids"][0]
    everything = model(tokens).log_softmax(-1)
    logprobs = everything.gather(-1, tokens[:, None])[:, 0]
    lengths = batch["sequence_lengths"]
    masked = everything.gather(-1, batch["sampling_mask"][0])
    given = ("inference_logprobs", "ref_logprobs", "advantages", "loss_mask")
    columns = {name: batch[name][0].split(lengths) for name in given}
    columns |= {"trainer_logprobs": logprobs.split(lengths), "trainer_mask_logprobs": masked.split(lengths)}
    streams = [LossInputs(**{name: column[place] for name, column in columns.items()}) for place in range(len(lengths))]
    compute_loss(streams, rl_loss_fn, max(1, int(batch["loss_mask"].sum()))).backward()


def main() -> None:
    """The configuration is a Python literal on the command line, as upstream's is a file."""
    import ast

    raw = ast.literal_eval(sys.argv[1])
    config = SimpleNamespace(**{key: SimpleNamespace(**v) if isinstance(v, dict) else v for key, v in raw.items()})
    config.output_dir = Path(config.output_dir)
    config.loss, config.env_vars = TypeAdapter(LossConfig).validate_python(raw["loss"]), raw["env_vars"]
    torch.set_num_threads(1)
    train(config)


if __name__ == "__main__":
    main()
