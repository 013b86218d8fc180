"""The terms of teachers' distributions on one micro batch: the hint stream's and the replay stream's, by their weights.

They stand beside whatever loss the recipe names, on the tokens that carry candidates.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from composer_prime import metrics
from composer_prime.config.distill import DistillConfig, weight_at
from composer_prime.losses.distill import DistillInputs, distill_loss
from composer_prime.losses.records import LossOutputs
from composer_prime.losses.taid import TaidSchedule, TaidState
from composer_prime.losses.trust_regions import keeps_low
from composer_prime.sites.embedded.packing import STREAMS, MicroBatch, Taught

_MEANS = ("teacher_entropy", "student_entropy", "overlap", "student_tail")
"""Sums that `distill_loss` gives, of which people read the mean a token."""

DPPO_LOW = 0.2
"""The loss's `dppo_mask_low` where the recipe doesn't set it."""


class Distiller:
    """The terms' settings, and where TAID stands. `loss` may be called any number of times for one step.

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
            found |= {metrics.distill(stream, name): total(f"{stream}/{name}") / num_tokens for name in _MEANS}
    return found
