"""How fast the loss is: plain and compiled, against the formulas written down naively, forward and backward.

Run by `composer-prime bench loss`; medians, because the machine is shared, and the load so that one can judge them.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from composer_prime.losses.composer import composer_loss
from composer_prime.losses.records import LossInputs

Loss = Callable[[LossInputs], Tensor]


def naive_loss(inputs: LossInputs, *, replay_tau: float = 0.1, replay_clip: float = 5.0) -> Tensor:
    """The formulas of `composer_loss` as they stand: no metrics, nothing guarded against overflow or NaN."""
    trainer, inference, adv, mask = (
        inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask
    )  # fmt: skip
    assert inputs.ref_logprobs is not None and inputs.loss_weights is not None
    log_ir = trainer - inference
    ir = log_ir.exp()
    moved = trainer.exp() - inference.exp()
    keep = mask & ~torch.where(adv > 0, moved > 0.2, moved < -0.2)
    taught = inputs.ref_logprobs.isfinite() & (inputs.ref_logprobs != 0) & mask & ~(moved < -0.2)
    pull = (inputs.ref_logprobs - trainer).clamp(-replay_clip, replay_clip).detach()
    per_token = -(keep * adv * ir) + 1e-3 * mask * log_ir**2 - replay_tau * taught * pull * ir
    return (inputs.loss_weights * per_token).sum()


def our_loss(inputs: LossInputs) -> Tensor:
    """`composer_loss` with all terms on; its metrics are made too."""
    return composer_loss(inputs, replay_tau=0.1).loss


def measure(num_tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds of one forward and backward pass over `num_tokens` tokens, by name of the loss.

    The first passes of each, compilation included, aren't counted; the losses take turns, so that load hits all alike.
    """
    inputs = _draw(num_tokens)
    losses: Mapping[str, Loss] = {
        "naive": naive_loss,
        "naive compiled": torch.compile(naive_loss),
        "ours": our_loss,
        "ours compiled": torch.compile(our_loss),
    }
    times: dict[str, list[float]] = {name: [] for name in losses}
    for repeat in range(-2, repeats):
        for name, loss in losses.items():
            seconds = _time_one(loss, inputs)
            if repeat >= 0:
                times[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def run(num_tokens: int = 65536, repeats: int = 30) -> dict[str, float]:
    """Print the medians and their ratio to the naive formula, and return the medians (seconds, by name)."""
    medians = measure(num_tokens, repeats)
    load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
    print(f"loss, forward and backward: {num_tokens} tokens, median of {repeats}, {torch.get_num_threads()} threads")
    for name, seconds in medians.items():
        print(f"  {name:<15} {seconds * 1e3:10.3f} ms   {seconds / medians['naive']:6.2f} x naive")
    print(f"  load average {load}")
    return medians


def main(num_tokens: int = 65536, repeats: int = 30) -> None:
    """What `composer-prime bench loss` calls."""
    run(num_tokens, repeats)


def _draw(num_tokens: int) -> LossInputs:
    """Samples of 512 tokens, a quarter of each the prompt: masks in spans, as in training."""
    draws = torch.Generator().manual_seed(0)
    trainer = -3 * torch.rand(num_tokens, generator=draws)
    return LossInputs(
        trainer_logprobs=trainer.clone().requires_grad_(),
        inference_logprobs=trainer + 0.1 * torch.randn(num_tokens, generator=draws),
        advantages=torch.randn(num_tokens, generator=draws),
        loss_mask=torch.arange(num_tokens) % 512 >= 128,
        ref_logprobs=-torch.rand(num_tokens, generator=draws),
        loss_weights=torch.rand(num_tokens, generator=draws),
    )


def _time_one(loss: Loss, inputs: LossInputs) -> float:
    inputs.trainer_logprobs.grad = None
    start = time.perf_counter()
    loss(inputs).backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
