"""What every site of a run agrees on, since it changes bits or the pace of all. Part of the manifest.

`SharedOuter` has what a recipe may set (config/outer.py); here stands what the program fixes or derives besides.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from composer_prime.config.outer import SharedOuter
from composer_prime.errors import ConfigError
from composer_prime.sync.canonical import Positive, Record

if TYPE_CHECKING:
    from composer_prime.config.recipe import RecipeBase


class Terms(SharedOuter, Record):
    """The settings of the outer loop, frozen when the run is created."""

    error_feedback: bool = True
    """Whether a site adds what coding took from its last merged offer to the next one."""
    gather_sites: Positive = 4
    """Up to so many offers everyone reads everyone's; a round of more is cut into parts, each merged by one site."""
    slices: int = Field(default=128, ge=1, le=1024)
    """At most so many pieces of a payload have a hash of their own and can be read alone."""
    clip: float = Field(default=2.0, gt=0)
    """With aggregate "clipped": an offer's norm is cut to this multiple of the round's median norm."""
    guest_share: float = Field(default=1 / 3, gt=0, le=0.5)
    """Of a round's weight, the most that all guests have together."""
    guest_clip: float = Field(default=1.0, gt=0)
    """A guest's norm is cut to this multiple of the median norm of the sites that are no guests."""
    step_tokens: Positive | None = None
    """Most tokens that an inner step trains: an offer of more, for the rounds behind it, is refused. None: no claim of
    tokens or steps is compared with anything."""
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

    def most_steps(self, rounds: int) -> int:
        """Inner steps that no site makes more of while a fragment has so many rounds.

        A site blocks `sync_delay` steps after an offer until that round has closed, so rounds bound its steps. Two
        rounds more: the one that is open, and the steps that overlap with it.
        """
        return (rounds + 2) * self.fragments * (self.steps_per_turn + self.sync_delay)


ASKED = {*Terms.model_fields} - {"error_feedback", "gather_sites", "slices", "clip", "guest_share", "guest_clip"}
"""What a recipe asks of a run, and must find there; the rest is as the program that created the run had it."""


def terms_of(recipe: "RecipeBase") -> Terms:
    """What the recipe's `[outer]` table and `max_steps` ask of a run. Raises ConfigError when it has no such table."""
    outer = recipe.outer
    if outer is None:
        raise ConfigError("the recipe has no [outer] table: add one to take part in an outer loop")
    wanted = {name: getattr(outer, name) for name in SharedOuter.model_fields}
    step_tokens = recipe.step_tokens if outer.owner else None
    return Terms(**wanted, step_tokens=step_tokens, rounds=recipe.rounds)
