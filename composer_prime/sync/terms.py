"""What every site of a run agrees on, since it changes bits or the pace of all. Part of the manifest.

Defaults and bounds are the recipe's (`config/outer.py`); here stands what a run in the bucket says of itself.
"""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from composer_prime.config.recipe import RecipeBase
from composer_prime.errors import ConfigError
from composer_prime.sync.canonical import Count, Positive, Record

STEPS_PER_S = 100
"""Inner steps that no machine makes more of in a second: each samples rollouts, trains on them, and moves weights."""


class Terms(Record):
    """The settings of the outer loop, frozen when the run is created."""

    inner_steps: Positive
    """H: inner steps between two offers of the same fragment."""
    fragments: Positive
    """P: fragments the model is cut into."""
    sync_delay: Count
    """tau: inner steps a round may take before the training thread waits for it."""
    merge_alpha: float = Field(default=0.0, ge=0, le=1)
    """alpha: how much of the local value the blend keeps; 0 is the exact rule."""
    pace: Literal["steps", "seconds"] = "steps"
    """What makes a fragment due: inner steps, or seconds since the last round (sites of different speed)."""
    inner_seconds: float = Field(default=0.0, ge=0)
    """With pace "seconds": H in seconds."""

    lr: float = Field(gt=0)
    """Outer learning rate."""
    momentum: float = Field(ge=0, lt=1)
    """Outer Nesterov momentum; with 0 masters hold none, and are half as large."""
    codec: str
    """Codec of the payloads."""
    merged_codec: str = "int8"
    """Codec of the merged parts of a sliced round."""
    error_feedback: bool = True
    """Whether a site adds what coding took from its last merged offer to the next one."""

    weighting: Literal["tokens", "steps", "equal"] = "tokens"
    """How the offers of a round are weighted against each other."""
    aggregate: Literal["mean", "clipped", "trimmed", "median"] = "mean"
    """How the offers of a round become one pseudo-gradient."""
    clip: float = Field(default=2.0, gt=0)
    """With another aggregate than "mean": an offer's norm is cut to this multiple of the round's median norm."""
    trim: float = Field(default=0.2, ge=0, lt=0.5)
    """With aggregate "trimmed": share of the values cut off at each end."""
    guest_share: float = Field(default=1 / 3, gt=0, le=0.5)
    """Of a round's weight, the most that all guests have together."""
    guest_clip: float = Field(default=1.0, gt=0)
    """A guest's norm is cut to this multiple of the median norm of the sites that are no guests."""
    step_tokens: Positive | None = None
    """Most tokens that an inner step trains; None: no claim of tokens or steps is compared with anything."""

    gather_sites: Positive = 4
    """Up to so many offers everyone reads everyone's; a round of more is cut into parts, each merged by one site."""
    slices: int = Field(default=128, ge=1, le=1024)
    """At most so many pieces of a payload have a hash of their own and can be read alone."""
    quorum: Positive
    """Valid offers without which no round merges anything."""
    grace_s: float = Field(ge=0)
    """Longest time, from the quorum-th valid offer, that a round waits for the other live sites, seconds."""
    liveness_s: float = Field(gt=0)
    """Seconds without a new beat after which a site isn't waited for."""
    max_stale_rounds: Positive
    """Rounds a site may miss with an offer out before its carried work is dropped."""
    snapshot_rounds: Positive
    """K: rounds between two snapshots of a master."""
    keep_log: bool = True
    """Whether offers and payloads that nobody needs any more are kept, so that the whole run can be verified."""
    committer: str | None = None
    """The only site that creates commits, for a store that lets two writers of one key win; None: every site may."""
    rounds: Positive
    """Training rounds of every fragment, after which the run ends for all sites. One closing round follows."""

    @property
    def final_version(self) -> int:
        """The version at which every master is finished: the training rounds and the closing one."""
        return self.rounds + 1

    @property
    def has_momentum(self) -> bool:
        """Whether masters hold outer momentum beside the weights."""
        return self.momentum > 0

    def master_nbytes(self, numel: int) -> int:
        """Bytes of a master of so many parameters: fp32 weights, and momentum if there is any."""
        return (8 if self.has_momentum else 4) * numel

    @property
    def steps_per_turn(self) -> int:
        """Inner steps from one due step to the next: H / P."""
        return self.inner_steps // self.fragments

    @property
    def seconds_per_turn(self) -> float:
        """With pace "seconds": seconds from one due step to the next."""
        return self.inner_seconds / self.fragments

    def most_steps(self, rounds: int) -> int:
        """Inner steps that no site makes more of while a fragment has so many rounds.

        A site blocks `sync_delay` steps after an offer until that round has closed, so rounds bound its steps, and with
        pace "seconds" its time. Two rounds more: the one that is open, and the steps that overlap with it.
        """
        turns = (rounds + 2) * self.fragments
        if self.pace == "steps":
            return turns * (self.steps_per_turn + self.sync_delay)
        return turns * (math.ceil(self.seconds_per_turn * STEPS_PER_S) + self.sync_delay)

    @model_validator(mode="after")
    def _check_pace(self) -> Self:
        if self.pace == "seconds" and self.inner_seconds <= 0:
            raise ValueError(
                f'outer.inner_seconds ({self.inner_seconds}) must be above 0 with outer.pace "seconds": '
                "say how long a site trains between two offers of a fragment"
            )
        return self


def terms_of(recipe: RecipeBase) -> Terms:
    """What the recipe's `[outer]` table and `max_steps` ask of a run. Raises ConfigError when it has no such table."""
    outer = recipe.outer
    if outer is None:
        raise ConfigError("the recipe has no [outer] table: add one to take part in an outer loop")
    wanted = {name: getattr(outer, name) for name in Terms.model_fields if name != "rounds"}
    if wanted["step_tokens"] is None and (outer.owner or outer.keys):
        wanted["step_tokens"] = recipe.step_tokens
    return Terms(**wanted, rounds=recipe.rounds)
