"""A loss module for upstream's trainer that keeps the first step's gradient, and may add the term by its definition.

`KEEP_GRADIENT` is the file; each rank takes part, the first writes. Where `WHOLE_TERM` is set the term comes from the
plain head's full logits, in code that shares nothing with ours; elsewhere ours is installed as ever. Where
`CPU_SECONDS` is set upstream's clock counts those, which other processes on the machine don't stretch.
"""

import os
import sys
import time
from typing import Any

import torch
from torch import Tensor

from composer_prime.sites.prime_rl.outer import loss
from tests.sites.prime_rl.topk.forward_kl import forward_kl

__all__ = ["loss"]

_names = vars(sys.modules["__main__"])


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def _keeping(setup: Any) -> Any:
    def setup_optimizer(*args: Any, **kwargs: Any) -> Any:
        made = setup(*args, **kwargs)
        optimizer = made[0] if isinstance(made, tuple) else made
        named = list(kwargs.get("named_params") or args[1])
        path = os.environ["KEEP_GRADIENT"]

        def keep(*args: Any) -> None:
            if not os.path.exists(path):
                kept = {name: _whole(p.grad).clone() for name, p in named if p.grad is not None}
                if int(os.environ["RANK"]) == 0:
                    torch.save(kept, path)

        optimizer.register_step_pre_hook(keep)
        return made

    return setup_optimizer


class _Whole:
    """The term of each micro batch, from full logits; one teacher a token, every taught token in the RL loss."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        self.logits: Tensor | None = None
        loader, forward, compute_loss = (_names[name] for name in ("DataLoader", "forward", "compute_loss"))
        whole = self

        class Loader(loader):
            def get_batch(self) -> list[Any]:
                whole.waiting = super().get_batch()
                return list(whole.waiting)

        def forwarding(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            whole.logits = out["logits"]
            return out

        def adding(**given: Any) -> Any:
            total, metrics = compute_loss(**given)
            return total + whole.term(whole.waiting.pop(0)) / given["rl_scale"], metrics

        _names.update(DataLoader=Loader, forward=forwarding, compute_loss=adding)

    def term(self, batch: dict[str, Any]) -> Tensor:
        """The sum over the taught tokens of one packed row."""
        assert self.logits is not None
        every = self.logits[0].float().log_softmax(-1)
        stored, bits = batch["routed_experts"][0].unbind(1)
        places = ((stored[:, 0] != 0) & batch["loss_mask"][0]).nonzero().flatten()
        student = every[places - 1].gather(1, stored[places].long() - 1)
        return forward_kl(student, bits[places].view(torch.float32)).sum()


class _CpuClock:
    """The module `time`, with the process's seconds as its clock."""

    perf_counter = staticmethod(time.process_time)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


if "CPU_SECONDS" in os.environ:
    _names["time"] = _CpuClock()
if "KEEP_GRADIENT" in os.environ:
    _names["setup_optimizer"] = _keeping(_names["setup_optimizer"])
if "WHOLE_TERM" in os.environ:
    _Whole()
