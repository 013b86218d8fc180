"""TAID's schedule: how far the distillation target has moved from the policy (0) to the teacher (1).

The target moves faster while the loss falls. Every update but the first brings it at least to where a straight line
over training stands at that step; between updates it stays.
"""

import math
from typing import TypedDict

from composer_prime.errors import ConfigError


class TaidState(TypedDict):
    """t: the teacher's share. prev_loss: loss of the last update, inf before the first. momentum: of its change."""

    t: float
    prev_loss: float
    momentum: float


class TaidSchedule:
    """Interpolation time t of TAID; pass `.t` to `distill_loss` as taid_t.

        change    = (prev_loss - loss) / (prev_loss + 1e-15)
        momentum  = beta * momentum + (1 - beta) * change
        t         = min(t_end, max(t_start + (t_end - t_start) * step / num_steps,
                                   t + alpha * sigmoid(momentum) * (1 - t)))

    num_steps  training steps in all
    t_start    t before the second update, in [0, 1)
    t_end      t is never above it, in (0, 1]
    alpha      largest move of t in one update, in [0, 1]
    beta       decay of the momentum, in [0, 1]

    Raises ConfigError for a setting outside its bounds.

    Source: TAID arXiv:2501.16937, `update_t` in SakanaAI/TAID a062892 (which works in fp32, this in fp64).
    """

    def __init__(
        self, num_steps: int, *, t_start: float = 0.4, t_end: float = 1.0, alpha: float = 5e-4, beta: float = 0.99
    ) -> None:
        if num_steps < 1:
            raise ConfigError(f"num_steps ({num_steps}) must be at least 1: pass the number of training steps")
        if not 0 <= t_start < 1 or not 0 < t_end <= 1:
            raise ConfigError(f"t_start ({t_start}) must lie in [0, 1) and t_end ({t_end}) in (0, 1]: move them inside")
        if not 0 <= alpha <= 1 or not 0 <= beta <= 1:
            raise ConfigError(f"alpha ({alpha}) and beta ({beta}) must lie in [0, 1]: move them inside")
        self.num_steps, self.t_start, self.t_end, self.alpha, self.beta = num_steps, t_start, t_end, alpha, beta
        self.t, self._prev_loss, self._momentum = t_start, math.inf, 0.0

    def update(self, loss: float, step: int) -> float:
        """Move t after a training step, and return it. The first call only remembers the loss.

        loss  mean divergence of one token, nats: a sum would follow the batch's size
        step  steps done, from 0

        Raises ValueError for a loss that isn't finite.
        """
        if not math.isfinite(loss):
            raise ValueError(f"TAID's loss ({loss}) must be finite: skip the update, and look for what made it so")
        if math.isfinite(self._prev_loss):
            change = (self._prev_loss - loss) / (self._prev_loss + 1e-15)
            self._momentum = self.beta * self._momentum + (1 - self.beta) * change
            line = self.t_start + (self.t_end - self.t_start) * step / self.num_steps
            moved = self.t + self.alpha * _sigmoid(self._momentum) * (1 - self.t)
            self.t = min(self.t_end, max(line, moved))
        self._prev_loss = loss
        return self.t

    def state_dict(self) -> TaidState:
        """What `load_state_dict` needs to go on; the settings aren't in it."""
        return {"t": self.t, "prev_loss": self._prev_loss, "momentum": self._momentum}

    def load_state_dict(self, state: TaidState) -> None:
        self.t, self._prev_loss, self._momentum = state["t"], state["prev_loss"], state["momentum"]


def _sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), which doesn't overflow."""
    return 0.5 * (1 + math.tanh(x / 2))
