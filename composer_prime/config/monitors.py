"""Where a site logs its trained steps besides its own files: `[monitors]`, as PRIME-RL names it."""

from pydantic import Field

from composer_prime.config.table import Table


class TrackioConfig(Table):
    """`[monitors.trackio]`: of the keys of `[monitors.wandb]` those that Trackio has; PRIME-RL hasn't got it."""

    project: str = Field(default="prime-rl", min_length=1)
    name: str | None = Field(default=None, min_length=1)
    """A site's run is called {name}-{site}. None: run.name."""
    group: str | None = Field(default=None, min_length=1)
    """What the sites' runs are shown under. None: run.name."""


class WandbConfig(TrackioConfig):
    """`[monitors.wandb]`: Weights & Biases."""

    entity: str | None = Field(default=None, min_length=1)
    tags: tuple[str, ...] = ()
    offline: bool = False
    """Log into the site's folder, for `wandb sync`. The variable WANDB_MODE wins."""


class MonitorsConfig(Table):
    """`[monitors]`: where each trained step is logged, besides the site's files."""

    wandb: WandbConfig | None = None
    trackio: TrackioConfig | None = None
