"""The tables beside training's: the outer loop, the site, the sites of a local run, their machines and monitors.

Symbols are those of Streaming DiLoCo (arXiv:2501.18512): H inner steps, P fragments and delay tau.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from composer_prime.config.table import SiteName, Table, shared

TOPK_ROUNDS = 25
"""Rounds of a fragment from which codec "topk" costs little: on the demo it ended 0.20 below fp32 after 5 of them, 0.01
after 25 (docs/benchmarks.md)."""


_MOST = 10**6


class SharedOuter(BaseModel):
    """What all sites of a run share of its outer loop: a recipe's settings, and with what the program adds (sync/terms)
    the run's terms."""

    inner_steps: int = shared(default=8, ge=1, le=_MOST)
    """H: inner (training) steps between two offers of the same fragment."""

    fragments: int = shared(default=2, ge=1, le=_MOST)
    """P: parts the parameters are cut into; one of them is due every H / P inner steps."""

    sync_delay: int = shared(default=1, ge=0, le=_MOST)
    """tau, inner steps: how long coding, upload and download may overlap with training before the trainer waits."""

    lr: float = shared(default=1.0, gt=0)
    """Outer learning rate, of the Nesterov step on the averaged pseudo-gradient."""

    momentum: float = shared(default=0.0, ge=0, lt=1)
    """mu: outer Nesterov momentum; 0 makes the outer step plain averaging, and masters half as large."""

    codec: Literal["fp32", "bf16", "int8", "int4", "topk"] = shared(default="int8")
    """How a pseudo-gradient travels: 4, 2, about 1, or about a half byte a parameter; topk: 64 of 4096 values, 207
    times smaller than fp32, for outer momentum 0 (SparseLoCo, arXiv:2508.15706)."""

    quorum: int = shared(default=1, ge=1, le=_MOST)
    """Valid offers a round needs before it may be committed without those still missing."""

    grace_s: float = shared(default=30.0, ge=0, le=_MOST)
    """Longest time, seconds, that a round stays open for the missing live sites after its quorum is reached. A site
    waits as long as its last rounds took, at most this."""

    liveness_s: float = shared(default=15.0, gt=0, le=_MOST)
    """Seconds without a new beat after which a site is no longer waited for."""

    weighting: Literal["tokens", "steps", "equal"] = shared(default="tokens")
    """An offer's weight in the mean: by the tokens or the steps it was trained on, or the same for every site. In a run
    with an owner the default is "equal", since tokens and steps are what a site says of itself."""

    aggregate: Literal["mean", "clipped"] = shared(default="mean")
    """How offers become one: their weighted mean, or that of offers cut to twice the round's median norm. In a run with
    an owner the default is "clipped"."""

    snapshot_rounds: int = shared(default=4, ge=1, le=_MOST)
    """K: a master is stored every K rounds of its fragment, for joiners and laggards."""

    keep_log: bool = shared(default=True)
    """Whether payloads that no site needs any more stay in the bucket, so that the whole run can be verified."""

    max_stale_rounds: int = shared(default=8, ge=1, le=_MOST)
    """Rounds a carried offer may miss; older work is dropped, and the tokens lost with it are counted."""

    @property
    def steps_per_turn(self) -> int:
        """Inner steps between two due fragments, H / P."""
        return self.inner_steps // self.fragments


class OuterConfig(SharedOuter, Table):
    """`[outer]`: how sites meet in the bucket. Without this table a site trains alone."""

    store: str | None = None
    """Where the bucket is: s3://bucket/prefix, file:///folder or a folder, or the gateway in front of it,
    gateway+https://host. None: a folder beside the run's sites."""

    owner: str | None = None
    """Public key that may admit and revoke keys; see `composer-prime keygen`. Everything that sites
    write is signed then: the site that creates the run is admitted by its site.key_file, others by the owner."""

    @model_validator(mode="before")
    @classmethod
    def _default_with_keys(cls, data: Any) -> Any:
        """Where keys are admitted, strangers may be: no claim of a site's own decides what its offer weighs."""
        if not isinstance(data, dict) or not data.get("owner"):
            return data
        return {"weighting": "equal", "aggregate": "clipped", **data}

    @model_validator(mode="after")
    def _check_cadence(self) -> Self:
        steps, fragments = self.inner_steps, self.fragments
        if steps % fragments:
            raise ValueError(
                f"outer.inner_steps ({steps}) must be a multiple of outer.fragments ({fragments}): "
                f"try {max(1, round(steps / fragments)) * fragments}, or other fragments"
            )
        if self.sync_delay >= self.steps_per_turn:
            raise ValueError(
                f"outer.sync_delay ({self.sync_delay}) must be smaller than outer.inner_steps / outer.fragments "
                f"({self.steps_per_turn}): lower the delay or sync less often"
            )
        return self


class SiteConfig(Table):
    """`[site]`: what one site is."""

    name: SiteName = "a"
    """The site's name in the bucket, when a single site runs; the sites of a larger local run are a, b, c, ..."""

    backend: Literal["embedded", "prime-rl"] = shared("embedded")
    """What trains: our three processes, or a real PRIME-RL."""

    device: Literal["cpu", "cuda", "mps"] = "cpu"
    """Where an embedded site trains and generates, in torch's word: one device, which its processes share."""

    key_file: Path | None = None
    """The site's private key, in a run that admits keys; see `composer-prime keygen`."""

    same_name: Literal["replace", "refuse"] = "replace"
    """What happens when a process of this site's name is still alive: it is taken over, or this one stops."""

    threads: int = Field(default=1, ge=1, le=256)
    """Threads of the trainer, and of the inference server, of an embedded site; one each where sites share cores."""

    micro_batch_tokens: int = Field(default=1536, ge=128)
    """Tokens of one forward pass of an embedded site's trainer, about: what its memory is made of, beside the model."""

    max_mbit_up: float | None = Field(default=None, gt=0)
    """Mbit/s that a site sends to the bucket, on average; None: what the link gives."""

    max_mbit_down: float | None = Field(default=None, gt=0)
    """Mbit/s that it fetches from the bucket."""


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


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            f"launch.secrets ({name!r}) must be names of environment variables, such as HF_TOKEN: "
            "export the value where you launch, and write its name here"
        )
    return name


class LaunchConfig(Table):
    """`[launch]`: the machine that `composer-prime launch` asks a platform for, for every site alike.

    It changes nothing that is learned, and options of the command win over it. Secrets stand here by name alone.
    """

    gpu: str | None = None
    """A GPU as the platform names it: "H100" on Modal, where "H100,A100-80GB" takes either, "h200" on HF Jobs. None:
    no GPU."""

    gpu_count: int | None = Field(default=None, ge=1, le=16)
    """GPUs of a site, when `gpu` is set; None: as many as `[deployment]` asks for, else 1."""

    cpus: float | None = Field(default=None, gt=0)
    """CPU cores; None: the platform's default."""

    memory_gib: float | None = Field(default=None, gt=0)
    """GiB of memory; None: the platform's default."""

    disk_gib: float | None = Field(default=None, gt=0)
    """GiB of disk; None: the platform's default."""

    image: str | None = None
    """Container image that has composer-prime; None: the platform's default."""

    registry_secret: str | None = Field(default=None, min_length=1)
    """Modal's secret with REGISTRY_USERNAME and REGISTRY_PASSWORD, for an image in a private registry."""

    timeout_hours: float = Field(default=24.0, gt=0, le=24 * 14)
    """Hours after which the platform ends a job. The next attempt goes on where it was."""

    stall_after_s: float = Field(default=3600.0, ge=0)
    """Seconds without an inner step after which a site is started again, though its beats go on; 0: never. Longer than
    the longest step and transfer: a site that waits for others with its offer out is left alone."""

    caches: dict[str, str] = Field(default_factory=dict)
    """Folders that outlive a job where the platform can keep them: name -> absolute path in the job."""

    secrets: tuple[Annotated[str, AfterValidator(_check_variable)], ...] = ()
    """Environment variables of the launcher that a job gets as secrets, besides the ones it always gets."""

    region: str | None = Field(default=None, min_length=1)
    """Where the jobs run, where the platform lets one choose; a bucket in another region is warned about."""

    cloud: str | None = Field(default=None, min_length=1)
    """On whose machines Modal and SkyPilot run them: "aws", "gcp", "oci"."""

    nonpreemptible: bool = False
    """Whether the platform must not take a job's machine back; at a higher price, and on Modal without a GPU only."""

    @model_validator(mode="after")
    def _check_caches(self) -> Self:
        for name, path in self.caches.items():
            if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name) or not path.startswith("/"):
                raise ValueError(
                    f"launch.caches.{name} ({path}) must be a short lower-case name and an absolute path: "
                    'write weights = "/cache/weights"'
                )
        return self


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
