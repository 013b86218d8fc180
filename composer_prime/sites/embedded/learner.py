"""One training step: samples in, weights moved, numbers out. No files, no clocks but its own stopwatch.

The loss is whatever function the recipe names, called as PRIME-RL calls it: once per sample, summed over tokens, and
divided by the number of trained tokens of the whole batch. The optimizer is AdamW, or Muon for matrices and AdamW for
the rest, as PRIME-RL's trainer/optim.py has it.
"""

import importlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from composer_prime import metrics
from composer_prime.config.distill import DistillConfig, weight_at
from composer_prime.config.recipe import LossConfig, OptimConfig, SchedulerConfig
from composer_prime.errors import ConfigError, SiteError
from composer_prime.losses.distill import DistillInputs, distill_loss
from composer_prime.losses.records import LossInputs, LossOutputs
from composer_prime.losses.taid import TaidSchedule, TaidState
from composer_prime.losses.trust_regions import keeps_low
from composer_prime.sites.embedded.batches import TrainingSample
from composer_prime.sites.embedded.packing import (
    MICRO_BATCH_TOKENS,
    STREAMS,
    MicroBatch,
    Taught,
    pack,
    trainer_logprobs,
)

LossFn = Callable[[LossInputs], LossOutputs]

_SUMS = {"policy_loss": metrics.LOSS_POLICY, "kl_loss": metrics.LOSS_KL, "replay_loss": metrics.LOSS_REPLAY}
_COUNTS = {"num_teacher_tokens": metrics.LOSS_NUM_TEACHER_TOKENS}
_MEANS = {"mismatch_kl": metrics.LOSS_MISMATCH_KL, "is_masked": metrics.LOSS_IS_MASKED}


_NO_MATRICES = ("embed_tokens", "lm_head")
"""Tables of rows that don't act as matrices: Muon leaves them to AdamW."""


_STREAM_MEANS = ("teacher_entropy", "student_entropy", "overlap", "student_tail")
"""Sums that `distill_loss` gives, of which people read the mean a token."""

DPPO_LOW = 0.2
"""The loss's `dppo_mask_low` where the recipe doesn't set it."""


@dataclass(frozen=True)
class StepReport:
    """What one training step did.

    tokens     trained on: the sum of the loss mask
    samples    in the batch
    loss       divided by `tokens`
    grad_norm  before clipping
    train_s    seconds of forward, backward and optimizer
    details    means per token and counts of the loss, by the names of metrics.py; those it doesn't give are left out
    """

    tokens: int
    samples: int
    loss: float
    grad_norm: float
    train_s: float
    details: Mapping[str, float]


class Learner:
    """A model, its optimizer and a loss. Owns the optimizer's state; moves the model's parameters in place."""

    def __init__(
        self,
        model: PreTrainedModel,
        optim: OptimConfig,
        loss: LossFn,
        seq_len: int,
        micro_tokens: int = MICRO_BATCH_TOKENS,
        distill: DistillConfig | None = None,
        num_steps: int = 1,
        replay_low: float = DPPO_LOW,
        scheduler: SchedulerConfig | None = None,
    ) -> None:
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = inner_optimizer(model, optim)
        self._learning_rate = partial(learning_rate, optim.lr, scheduler or SchedulerConfig(), num_steps)
        self._loss = loss
        self.distiller = Distiller(distill or DistillConfig(), num_steps, replay_low)
        self._seq_len = seq_len
        self._micro_tokens = micro_tokens
        self._max_norm = math.inf if optim.max_norm is None else optim.max_norm

    def step(self, samples: Sequence[TrainingSample], step: int = 0) -> StepReport:
        """Take one optimizer step on a batch. One without a trained token moves nothing and reports zeros.

        step  its number, counted from 0: the learning rate and teachers' weights may have a schedule.

        Raises SiteError when the gradient isn't finite; the parameters are as before then.
        """
        started = time.perf_counter()
        batches = pack(samples, self._seq_len, self._micro_tokens)
        num_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        sums = _RunningSums()
        grad_norm = 0.0
        if num_tokens:
            self.optimizer.zero_grad()
            for batch in batches:
                self._accumulate(batch, num_tokens, sums, step)
            grad_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self._max_norm))
            if not math.isfinite(grad_norm):
                raise SiteError(
                    f"the gradient's norm is {grad_norm}, which must be finite: look for NaN in the batch or the loss, "
                    "or lower trainer.optim.lr, and resume from the last checkpoint"
                )
            self.optimizer.step(self._learning_rate(step))
            self.distiller.end_step(sums.total, step)
        return StepReport(
            tokens=num_tokens,
            samples=len(samples),
            loss=sums.total("loss") / max(num_tokens, 1),
            grad_norm=grad_norm,
            train_s=time.perf_counter() - started,
            details=sums.details(max(num_tokens, 1)),
        )

    def _accumulate(self, batch: MicroBatch, num_tokens: int, sums: "_RunningSums", step: int) -> None:
        """Forward and backward of one micro batch; the gradients add up in the parameters."""
        logprobs, taught = trainer_logprobs(self.model, batch, self.distiller.streams(step))
        streams = (logprobs, batch.inference_logprobs, batch.advantages, batch.loss_mask, batch.ref_logprobs)
        losses = []
        for ours, theirs, advantages, mask, refs in zip(*map(batch.split, streams), strict=True):
            outputs = self._loss(
                LossInputs(
                    trainer_logprobs=ours,
                    inference_logprobs=theirs,
                    advantages=advantages,
                    loss_mask=mask,
                    ref_logprobs=refs,
                )
            )
            losses.append(outputs.loss)
            sums.add(outputs, mask)
        if taught is not None:
            outputs = self.distiller.loss(taught, batch, logprobs.detach(), step)
            losses.append(outputs.loss)
            sums.add_sums(outputs)
        (torch.stack(losses).sum() / num_tokens).backward()


class Distiller:
    """The terms of teachers' distributions on a micro batch, beside the recipe's loss; and where TAID stands.

    `loss` may be called any number of times for one step.

    num_steps   training steps in all, over which TAID moves its targets from the policy's to the teacher's.
    replay_low  a token whose probability has fallen by more than this since it was sampled isn't replayed.
    """

    def __init__(self, config: DistillConfig, num_steps: int, replay_low: float = DPPO_LOW) -> None:
        self._config = config
        self._replay_low = replay_low
        self._taid = {stream: TaidSchedule(num_steps) for stream in STREAMS} if config.divergence == "taid" else {}

    def streams(self, step: int) -> list[str]:
        """Those that have a weight at a step."""
        return [stream for stream in STREAMS if self._tau(stream, step)]

    def loss(self, taught: Taught, batch: MicroBatch, logprobs: Tensor, step: int) -> LossOutputs:
        """The terms of `streams(step)`, summed over tokens; metrics are sums by `<stream>/<name>`.

        logprobs  fp32 (rows, width), of the trained tokens under the policy; without a graph.
        """
        old = batch.inference_logprobs.flatten()[taught.places]
        new = logprobs.flatten()[taught.places]
        config, found, total = self._config, {}, torch.zeros(())
        for stream in self.streams(step):
            mask = taught.is_hint if stream == "hint" else keeps_low(new, old, ~taught.is_hint, self._replay_low)
            outputs = distill_loss(
                DistillInputs(
                    student_logprobs=taught.student_logprobs, teacher_logprobs=taught.teacher_logprobs, mask=mask
                ),
                tau=self._tau(stream, step),
                divergence=config.divergence,
                jsd_alpha=config.jsd_alpha,
                taid_t=self._taid[stream].t if self._taid else None,
            )
            total = total + outputs.loss
            found |= {f"{stream}/{name}": value for name, value in outputs.metrics.items()}
        return LossOutputs(loss=total, metrics=found)

    def end_step(self, total: Callable[[str], float], step: int) -> None:
        """Let TAID see what a step cost. total: as for `stream_means`."""
        for stream, schedule in self._taid.items():
            scale = self._tau(stream, step) * total(f"{stream}/num_tokens")
            if scale:
                schedule.update(total(f"{stream}/loss") / scale, step)

    def state_dict(self) -> dict[str, TaidState]:
        """Where TAID stands, by stream; empty for other divergences."""
        return {stream: schedule.state_dict() for stream, schedule in self._taid.items()}

    def load_state_dict(self, state: Mapping[str, TaidState]) -> None:
        """Go on from what `state_dict` gave."""
        for stream, schedule in self._taid.items():
            if stream in state:
                schedule.load_state_dict(state[stream])

    def _tau(self, stream: str, step: int) -> float:
        return weight_at(self._config.hint_tau if stream == "hint" else self._config.replay_tau, step)


def stream_means(total: Callable[[str], float]) -> dict[str, float]:
    """From sums over a step's tokens to what is logged, by the names of metrics.py; nothing of a stream without tokens.

    total  the sum of one of `Distiller.loss`'s metrics, 0.0 where there is none.
    """
    found = {}
    for stream in STREAMS:
        num_tokens = total(f"{stream}/num_tokens")
        if num_tokens:
            found[metrics.distill(stream, "tokens")] = num_tokens
            found[metrics.distill(stream, "loss")] = total(f"{stream}/loss") / num_tokens
            found |= {metrics.distill(stream, name): total(f"{stream}/{name}") / num_tokens for name in _STREAM_MEANS}
    return found


class _RunningSums:
    """Adds up the loss and its metrics over the samples of a batch."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, outputs: LossOutputs, mask: Tensor) -> None:
        num_tokens = mask.sum()
        found = {"loss": outputs.loss.detach()}
        found |= {name: outputs.metrics[name] for name in _SUMS | _COUNTS if name in outputs.metrics}
        found |= {name: outputs.metrics[name] * num_tokens for name in _MEANS if name in outputs.metrics}
        for name, value in found.items():
            self._values.setdefault(name, []).append(value)

    def add_sums(self, outputs: LossOutputs) -> None:
        """A term's own sums over tokens, besides its part of the loss."""
        for name, value in {"loss": outputs.loss.detach(), **outputs.metrics}.items():
            self._values.setdefault(name, []).append(value)

    def total(self, name: str) -> float:
        values = self._values.get(name, [])
        return float(torch.stack(values).sum(dtype=torch.float64)) if values else 0.0

    def details(self, num_tokens: int) -> dict[str, float]:
        names = _SUMS | _MEANS
        found = {names[name]: self.total(name) / num_tokens for name in self._values if name in names}
        found |= {_COUNTS[name]: self.total(name) for name in self._values if name in _COUNTS}
        return found | stream_means(self.total)


class InnerOptimizer:
    """One or two of torch's optimizers, which share the parameters of a model, as one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = tuple(parts)

    def step(self, lr: float) -> None:
        """Move the parameters by their gradients, with a learning rate."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; of AdamW alone it is torch's own."""
        if len(self._parts) == 1:
            return self._parts[0].state_dict()
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part, its in zip(self._parts, state.get("parts", [state]), strict=True):
            part.load_state_dict(dict(its))


def inner_optimizer(model: nn.Module, config: OptimConfig) -> InnerOptimizer:
    """The optimizer of a model's parameters that have gradients, as `[trainer.optim]` says.

    Muon (Jordan et al. 2024) orthogonalizes the momentum of each matrix, and its step is scaled to the size of one of
    AdamW's (Liu et al. 2025, 2502.16982), so that both take the same learning rates. Embeddings, the head, norms and
    biases are AdamW's.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if config.type == "muon" and _is_matrix(name, parameter)]
    taken = {id(parameter) for parameter in matrices}
    parts: list[Optimizer] = []
    if matrices:
        parts.append(
            torch.optim.Muon(
                matrices,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.mu,
                nesterov=False,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    parts.append(
        torch.optim.AdamW(
            [parameter for _, parameter in named if id(parameter) not in taken],
            lr=config.lr,
            betas=(config.betas1, config.betas2),
            weight_decay=config.weight_decay,
            fused=True,
        )
    )
    return InnerOptimizer(parts)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not any(part in name for part in _NO_MATRICES)


def learning_rate(peak: float, scheduler: SchedulerConfig, num_steps: int, step: int) -> float:
    """The learning rate of a step, counted from 0, of `num_steps`: as PRIME-RL's trainer/scheduler.py sets it.

    A function of the step alone, so that a checkpoint needs no state of it.
    """
    if scheduler.type == "constant":
        return peak
    rising = step / scheduler.warmup_steps if scheduler.warmup_steps else 1.0
    left = num_steps - 1 - step
    falling = left / max(scheduler.decay_steps - 1, 1) if scheduler.decay_steps else 1.0
    return scheduler.min_lr + (peak - scheduler.min_lr) * max(0.0, min(1.0, rising, falling))


def import_loss(config: LossConfig) -> LossFn:
    """The loss that the recipe names, its keyword arguments filled in.

    Raises ConfigError when it can't be imported (the cause is shown) or doesn't take these arguments.
    """
    module_name, _, name = config.import_path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"trainer.loss.import_path ({config.import_path}) can't be imported ({error}): check its spelling and "
            "that its package is installed"
        ) from error
    signature = inspect.signature(function)
    try:
        signature.bind(None, **config.kwargs)
    except TypeError as error:
        known = ", ".join(list(signature.parameters)[1:])
        raise ConfigError(f"trainer.loss.kwargs don't fit {config.import_path} ({error}): it takes {known}") from error

    def loss(inputs: LossInputs) -> LossOutputs:
        return function(inputs, **config.kwargs)

    return loss
