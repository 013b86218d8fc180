"""The recipe's `[trainer.distill]`: how strongly, and by which divergence, teachers' distributions pull. No torch."""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Tag, model_validator

from composer_prime.config.table import Table, shared

MAX_K = 64
"""Most tokens that are kept of one distribution."""

LEAST_TAIL = 1e-7
"""A tail's least probability, so that its logarithm is a number: what rounding makes of k fp32 probabilities."""

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "taid", "entropy_aware"]


class Schedule(Table):
    """A weight that moves in a straight line over training steps, and stays at its end."""

    start: float = shared(ge=0, le=1000, allow_inf_nan=False)
    """Weight at step 0."""

    end: float = shared(ge=0, le=1000, allow_inf_nan=False)
    """Weight from step `steps` on."""

    steps: int = shared(ge=1, le=10**9)
    """Training steps between the two."""


def _kind(weight: object) -> str:
    return "schedule" if isinstance(weight, dict | Schedule) else "number"


Weight = Annotated[Annotated[float, Tag("number")] | Annotated[Schedule, Tag("schedule")], Discriminator(_kind)]
"""A number that stays, or a table {start, end, steps}; a mistake in either is said of that one alone."""


class DistillConfig(Table):
    """`[trainer.distill]`"""

    top_k: int = shared(default=8, ge=0, le=MAX_K)
    """How many of a teacher's likeliest tokens are learned from, at each token, beside a tail for the others; 0: the
    sampled token's number alone, by `trainer.loss.kwargs.replay_tau`."""

    hint_tau: Weight = shared(0.1)
    """alpha: weight of the hinted teacher's term, on taught rollouts; 0: off."""

    replay_tau: Weight = shared(1.0)
    """beta: weight of the term of `[[replay.teachers]]`; 0: off."""

    divergence: Divergence = shared("forward_kl")
    """What is measured between teacher and policy on the teacher's candidates and the tail."""

    jsd_alpha: float = shared(default=0.5, gt=0, lt=1)
    """The teacher's share of the mixture that "jsd" measures both against."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        for name in ("hint_tau", "replay_tau"):
            weight = getattr(self, name)
            if isinstance(weight, float) and not 0 <= weight < float("inf"):
                raise ValueError(f"{name} ({weight}) must be a number from 0: 0 turns the term off")
        if self.divergence != "jsd" and self.jsd_alpha != type(self).model_fields["jsd_alpha"].default:
            raise ValueError(
                f'jsd_alpha ({self.jsd_alpha}) is for divergence = "jsd", and it is "{self.divergence}": leave it out'
            )
        return self


def is_off(weight: Weight) -> bool:
    """Whether a weight is 0 at every step."""
    return not (weight.start or weight.end) if isinstance(weight, Schedule) else weight == 0


def weight_at(weight: Weight, step: int) -> float:
    """A weight at a training step, counted from 0."""
    if not isinstance(weight, Schedule):
        return weight
    share = min(step / weight.steps, 1.0)
    return weight.start + share * (weight.end - weight.start)
