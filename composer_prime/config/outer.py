"""The tables upstream doesn't have: the outer loop, the site, and the sites of a local run.

Symbols are those of Streaming DiLoCo (arXiv:2501.18512): H inner steps, P fragments, delay tau, blend alpha.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from composer_prime.config.table import SiteName, Table


class OuterConfig(Table):
    """`[outer]`: how sites meet in the bucket. Without this table a site trains alone."""

    store: str | None = None
    """Where the bucket is: s3://bucket/prefix, file:///folder or a folder. None: a folder beside the run's sites."""

    inner_steps: int = Field(default=8, ge=1)
    """H: inner (training) steps between two offers of the same fragment."""

    fragments: int = Field(default=2, ge=1)
    """P: parts the parameters are cut into; one of them is due every H / P inner steps."""

    sync_delay: int = Field(default=1, ge=0)
    """tau, inner steps: how long coding, upload and download may overlap with training before the trainer waits."""

    merge_alpha: float = Field(default=0.0, ge=0, le=1)
    """alpha: share of the local values kept when a round arrives; 0 adopts the master and carries local movement."""

    lr: float = Field(default=1.0, gt=0)
    """Outer learning rate, of the Nesterov step on the averaged pseudo-gradient."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """mu: outer Nesterov momentum; 0 makes the outer step plain averaging."""

    codec: Literal["fp32", "bf16", "int8"] = "int8"
    """How a pseudo-gradient travels: 4, 2 or about 1 byte a parameter."""

    quorum: int = Field(default=1, ge=1)
    """Valid offers a round needs before it may be committed without those still missing."""

    grace_s: float = Field(default=30.0, ge=0)
    """Seconds a round stays open for the missing live sites after its quorum is reached."""

    liveness_s: float = Field(default=15.0, gt=0)
    """Seconds without a new beat after which a site is no longer waited for."""

    weighting: Literal["tokens", "equal"] = "tokens"
    """An offer's weight in the mean: by the tokens it was trained on, or the same for every site."""

    snapshot_rounds: int = Field(default=4, ge=1)
    """K: a master is stored every K rounds of its fragment, for joiners and laggards."""

    max_stale_rounds: int = Field(default=8, ge=1)
    """Rounds a carried offer may miss; older work is dropped, and the tokens lost with it are counted."""

    @property
    def due_every(self) -> int:
        """Inner steps between two due fragments, H / P."""
        return self.inner_steps // self.fragments

    @model_validator(mode="after")
    def _check_cadence(self) -> Self:
        steps, fragments = self.inner_steps, self.fragments
        if steps % fragments:
            raise ValueError(
                f"outer.inner_steps ({steps}) must be a multiple of outer.fragments ({fragments}): "
                f"try {max(1, round(steps / fragments)) * fragments}, or other fragments"
            )
        if self.sync_delay >= self.due_every:
            raise ValueError(
                f"outer.sync_delay ({self.sync_delay}) must be smaller than outer.inner_steps / outer.fragments "
                f"({self.due_every}): lower the delay or sync less often"
            )
        return self


class SiteConfig(Table):
    """`[site]`: what one site is."""

    name: SiteName = "a"
    """The site's name in the bucket, when a single site runs; the sites of a larger local run are a, b, c, ..."""

    backend: Literal["embedded", "prime-rl"] = "embedded"
    """What trains: our three processes on a CPU, or a real PRIME-RL."""


class SiteOverrides(Table):
    """`[sites.overrides.<site>]`: where one site differs from the others. None takes the default."""

    data_shard: int | None = Field(default=None, ge=0)
    """Which shard of every taskset the site trains on; default: the site's position in the run."""

    sampling_seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seed of the site's task order and token sampling; default: drawn from run.seed and the site's name."""


class SitesConfig(Table):
    """`[sites]`: the sites that `composer-prime run` starts on this machine."""

    count: int = Field(default=1, ge=1, le=26)
    """How many sites start. More may join by hand at any time."""

    overrides: dict[SiteName, SiteOverrides] = Field(default_factory=dict)
    """Per site, by name; a name that isn't started here serves a site that joins by hand."""
