"""A preference pair as two weighted samples: the advantages under which a policy gradient is DPO's or SimPO's own.

At the policy that scored them, the policy-gradient loss of a token has the gradient of -advantage times its
log-probability. So the trainer needs no preference loss, and neither does PRIME-RL's.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

PreferenceLoss = Literal["dpo", "simpo"]
FALL = 0.1
"""Nats a token; an agreed action that lost more since it was last scored is falling, and its preference term rests."""


class Formed:
    """Which agreed actions the policy can form and isn't losing: on these a preference acts.

    floor  nats a token below which it can't
    """

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._last: dict[Hashable, float] = {}

    def saw(self, key: Hashable, logprob: float) -> bool:
        """Whether an action is one of them, of which the policy now gives so many nats a token."""
        last, self._last[key] = self._last.get(key, logprob), logprob
        return logprob >= max(self._floor, last - FALL)


@dataclass(frozen=True)
class Scored:
    """An action under a policy.

    logprob     nats, summed over its tokens
    num_tokens  at least 1
    reference   nats, the same under the frozen reference; SimPO has none
    """

    logprob: float
    num_tokens: int
    reference: float = 0.0


def margin(loss: PreferenceLoss, chosen: Scored, rejected: Scored, *, beta: float, gamma: float = 0.0) -> float:
    """What the loss takes the sigmoid of: the log-odds that `chosen` is preferred, less SimPO's target `gamma`.

    Source: arXiv:2305.18290, equation 7; arXiv:2405.14734, equation 6.
    """
    if loss == "dpo":
        return beta * ((chosen.logprob - chosen.reference) - (rejected.logprob - rejected.reference))
    return beta * (chosen.logprob / chosen.num_tokens - rejected.logprob / rejected.num_tokens) - gamma


def lead(chosen: Scored, rejected: Scored) -> float:
    """Nats by which the policy prefers `chosen`, or by which it prefers it more than the reference, if that is less."""
    own = chosen.logprob - rejected.logprob
    return min(own, own - (chosen.reference - rejected.reference))


def pull(loss: PreferenceLoss, chosen: Scored, rejected: Scored, *, beta: float, gamma: float = 0.0) -> float:
    """beta * sigmoid(-margin): how hard the loss pulls the two actions apart, its slope in the margin over beta."""
    at = margin(loss, chosen, rejected, beta=beta, gamma=gamma)
    return beta / (1 + math.exp(at)) if at < 700 else 0.0  # exp(710) is beyond fp64


def pair_advantages(
    loss: PreferenceLoss, chosen: Scored, rejected: Scored, *, beta: float, gamma: float = 0.0
) -> tuple[float, float]:
    """Of each token of `chosen` and of `rejected`: +-beta * sigmoid(-margin), over the action's length for SimPO."""
    each = pull(loss, chosen, rejected, beta=beta, gamma=gamma)
    if loss == "dpo":
        return each, -each
    return each / chosen.num_tokens, -each / rejected.num_tokens
