"""A loss whose import puts a fake in place of NCCL under upstream's own weight broadcast, in the trainer's process.

What rank 0 sends it keeps, and writes to the file that NCCL_MESSAGES names when it ends.
"""

import atexit
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.sites.prime_rl.own_losses import my_loss

__all__ = ["answer", "my_loss", "received"]

_sent: list[Tensor] = []


class Communicator:
    """Sends to nobody."""

    def __init__(self, group: Any, device: Any) -> None: ...

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """One message."""
        _sent.append(tensor.detach().clone())


def answer(folder: Path) -> None:
    """As the orchestrator does, once the trainer says that weights are ready: inference is, too."""
    for ready in folder.glob("broadcasts/step_*/STABLE"):
        ready.with_name("NCCL_READY").touch()


def received(file: Path) -> Iterator[dict[str, Tensor]]:
    """The weights of each broadcast, as inference reads the messages."""
    messages = iter(torch.load(file))
    for num_parts in messages:
        weights: dict[str, Tensor] = {}
        for _ in range(int(num_parts)):
            next(messages)  # how long what follows is
            for items in pickle.loads(bytes(next(messages).tolist())).values():
                values = next(messages).split([numel for _, _, numel in items])
                weights |= {name: value.view(shape) for (name, shape, _), value in zip(items, values, strict=True)}
        yield weights


if "NCCL_MESSAGES" in os.environ and os.environ["RANK"] == "0":
    atexit.register(lambda: torch.save(_sent, os.environ["NCCL_MESSAGES"]))

if "NCCL_MESSAGES" in os.environ:
    import prime_rl.transports.weights.nccl as nccl  # pyright: ignore[reportMissingImports]

    nccl.PyNcclCommunicator = Communicator
    nccl.StatelessProcessGroup = SimpleNamespace(create=lambda **kwargs: None)
    nccl.disable_nccl_p2p_if_unavailable = lambda: None
    torch.cuda.current_device = lambda: 0
