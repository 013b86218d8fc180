"""The recipe's tables for what is learned from files: `[replay.pairs]` and `[replay.traces]`. No torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from composer_prime.config.distill import Weight, is_off
from composer_prime.config.table import Table

_BETAS = {"dpo": 0.1, "simpo": 2.0}


class PreferenceConfig(Table):
    """What is learned of an action that teachers agree on, and of the author's in its place."""

    sft_tau: Weight = 1.0
    """Weight of the agreed action's cross entropy."""

    loss: Literal["dpo", "simpo"] = "dpo"
    """DPO (arXiv:2305.18290) against the run's first policy, or SimPO (arXiv:2405.14734), which needs no reference."""

    beta: float | None = Field(default=None, gt=0)
    """beta of the loss; None: 0.1 for DPO, 2 for SimPO."""

    gamma: float = Field(default=0.0, ge=0)
    """SimPO's target margin."""

    tau: Weight = 1.0
    """Weight of the preference term, where the author did something else."""

    min_logprob: float = Field(default=-1.0, le=0)
    """Nats a token of the agreed action, below which the preference term rests: the policy can't form it yet."""

    max_lead: float = Field(default=3.0, gt=0)
    """Nats by which the policy prefers what is chosen, as it is and against the run's first policy, from which on a
    pair rests."""

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.loss != "simpo" and self.gamma:
            raise ValueError(f'pairs.gamma ({self.gamma}) is for loss = "simpo", and it is "{self.loss}"')
        if is_off(self.tau) and is_off(self.sft_tau):
            raise ValueError("pairs.tau and sft_tau (0) must not both be 0, or nothing is learned: raise one")
        return self

    @property
    def scale(self) -> float:
        """beta, the loss's own where none is given."""
        return _BETAS[self.loss] if self.beta is None else self.beta

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with the run's first one."""
        return self.loss == "dpo" and not is_off(self.tau)


class PairsConfig(PreferenceConfig):
    """`[replay.pairs]`: what teachers agree on at the decision points of stored sessions."""

    store: Path
    """What `composer-prime replay ingest` filled."""

    file: Path
    """What `composer-prime replay pairs` wrote of it."""

    batch_size: int = Field(default=16, ge=1)
    """Decision points a training step."""

    held_out: float = Field(default=0.1, ge=0, lt=1)
    """Share of the points that a run without an environment doesn't learn from: it measures there how often the policy
    does what the teachers agree on."""

    too_long: Literal["cut", "leave_out"] = "cut"
    """Of a point longer than seq_len the oldest tool results are cut until it fits, or it is left out."""

    def anchored(self) -> Self:
        """The same with its paths absolute."""
        return self.model_copy(update={"store": self.store.absolute(), "file": self.file.absolute()})


class StoredTracesConfig(Table):
    """`[replay.traces]`: what the authors of stored sessions did, learned beside each step's rollouts."""

    store: Path
    """What `composer-prime replay ingest` filled."""

    scores: Path | None = None
    """What `composer-prime replay pairs` wrote: twice the share of teachers that agree with a turn, minus 1, is its
    advantage; None: every turn has advantage 1, which is cross entropy."""

    tau: Weight = 1.0
    """Weight of the term."""

    batch_size: int = Field(default=16, ge=1)
    """Turns a training step."""

    @model_validator(mode="after")
    def _check_weight(self) -> Self:
        if is_off(self.tau):
            raise ValueError("replay.traces.tau (0) must not be 0 at every step, or nothing is learned: raise it")
        return self

    def anchored(self) -> Self:
        """The same with its paths absolute."""
        return self.model_copy(
            update={"store": self.store.absolute(), "scores": self.scores and self.scores.absolute()}
        )
