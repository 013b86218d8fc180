"""The tables upstream doesn't have: the outer loop, the site, and the sites of a local run.

Symbols are those of Streaming DiLoCo (arXiv:2501.18512): H inner steps, P fragments, delay tau, blend alpha.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from composer_prime.config.table import SiteName, Table

TOPK_ROUNDS = 25
"""Rounds of a fragment from which codec "topk" costs little: on the demo it ended 0.20 below fp32 after 5 of them, 0.01
after 25 (docs/benchmarks.md)."""


class OuterConfig(Table):
    """`[outer]`: how sites meet in the bucket. Without this table a site trains alone."""

    store: str | None = None
    """Where the bucket is: s3://bucket/prefix, file:///folder or a folder, or the gateway in front of it,
    gateway+https://host. None: a folder beside the run's sites."""

    inner_steps: int = Field(default=8, ge=1)
    """H: inner (training) steps between two offers of the same fragment."""

    fragments: int = Field(default=2, ge=1)
    """P: parts the parameters are cut into; one of them is due every H / P inner steps."""

    sync_delay: int = Field(default=1, ge=0)
    """tau, inner steps: how long coding, upload and download may overlap with training before the trainer waits."""

    merge_alpha: float = Field(default=0.0, ge=0, le=1)
    """alpha: share of the local values kept when a round arrives; 0 adopts the master and carries local movement."""

    pace: Literal["steps", "seconds"] = "steps"
    """What makes a fragment due: every H / P inner steps, or `inner_seconds` / P after the last round, so that a fast
    and a slow site meet at the same time with different inner steps."""

    inner_seconds: float = Field(default=0.0, ge=0)
    """H in seconds, with pace "seconds"."""

    lr: float = Field(default=1.0, gt=0)
    """Outer learning rate, of the Nesterov step on the averaged pseudo-gradient."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """mu: outer Nesterov momentum; 0 makes the outer step plain averaging."""

    codec: Literal["fp32", "bf16", "int8", "int4", "e3m0", "topk"] = "int8"
    """How a pseudo-gradient travels: 4, 2, about 1, or about a half byte a parameter; topk: 64 of 4096 values, 207
    times smaller than fp32, for outer momentum 0 (SparseLoCo, arXiv:2508.15706)."""

    merged_codec: Literal["fp32", "bf16", "int8"] = "int8"
    """How the merged parts of a round of many sites travel."""

    error_feedback: bool = True
    """Whether what coding took from a site's last merged offer is added to its next one."""

    gather_sites: int = Field(default=4, ge=1)
    """Up to so many offers everyone reads everyone's; a round of more is cut into parts, each merged by one site."""

    slices: int = Field(default=128, ge=1, le=1024)
    """At most so many pieces of a payload have a hash of their own and can be read alone."""

    quorum: int = Field(default=1, ge=1)
    """Valid offers a round needs before it may be committed without those still missing."""

    grace_s: float = Field(default=30.0, ge=0)
    """Longest time, seconds, that a round stays open for the missing live sites after its quorum is reached. A site
    waits as long as its last rounds took, at most this."""

    liveness_s: float = Field(default=15.0, gt=0)
    """Seconds without a new beat after which a site is no longer waited for."""

    weighting: Literal["tokens", "steps", "equal"] = "tokens"
    """An offer's weight in the mean: by the tokens or the steps it was trained on, or the same for every site. In a run
    with an owner or keys the default is "equal", since tokens and steps are what a site says of itself."""

    aggregate: Literal["mean", "clipped", "trimmed", "median"] = "mean"
    """How offers become one: their weighted mean; that of offers cut to `clip` times the median norm; or, value by
    value and unweighted, the mean of what is left after cutting both ends (`trim`), or the median. In a run with an
    owner or keys the default is "clipped"."""

    clip: float = Field(default=2.0, gt=0)
    """With another aggregate than "mean": multiple of the round's median norm to which larger offers are cut."""

    trim: float = Field(default=0.2, ge=0, lt=0.5)
    """With aggregate "trimmed": share of the values cut off at each end."""

    guest_share: float = Field(default=1 / 3, gt=0, le=0.5)
    """Of a round's weight, the most that all guests have together."""

    guest_clip: float = Field(default=1.0, gt=0)
    """Multiple of the median norm of the sites that are no guests, to which a guest's offer is cut."""

    step_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that an inner step trains: an offer of more, for the rounds behind it, is refused. None: what batch
    and row length of the recipe allow, in a run with an owner or keys."""

    committer: SiteName | None = None
    """The only site that closes rounds, for a store that lets two writers of one key win. None: every site may."""

    owner: str | None = None
    """Public key that may admit and revoke keys and reopen the run; see `composer-prime keygen`."""

    keys: dict[SiteName, str] = Field(default_factory=dict)
    """Public key by site: only these sites take part, and everything they write is signed. Empty: whoever can write."""

    snapshot_rounds: int = Field(default=4, ge=1)
    """K: a master is stored every K rounds of its fragment, for joiners and laggards."""

    keep_log: bool = True
    """Whether payloads that no site needs any more stay in the bucket, so that the whole run can be verified."""

    max_stale_rounds: int = Field(default=8, ge=1)
    """Rounds a carried offer may miss; older work is dropped, and the tokens lost with it are counted."""

    @property
    def due_every(self) -> int:
        """Inner steps between two due fragments, H / P."""
        return self.inner_steps // self.fragments

    @model_validator(mode="before")
    @classmethod
    def _default_with_keys(cls, data: Any) -> Any:
        """Where keys are admitted, strangers may be: no claim of a site's own decides what its offer weighs."""
        if not isinstance(data, dict) or not (data.get("owner") or data.get("keys")):
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
        if self.sync_delay >= self.due_every:
            raise ValueError(
                f"outer.sync_delay ({self.sync_delay}) must be smaller than outer.inner_steps / outer.fragments "
                f"({self.due_every}): lower the delay or sync less often"
            )
        if self.pace == "seconds" and self.inner_seconds <= 0:
            raise ValueError(
                f'outer.inner_seconds ({self.inner_seconds}) must be above 0 with outer.pace "seconds": '
                "say how long a site trains between two offers of a fragment"
            )
        return self


class SiteConfig(Table):
    """`[site]`: what one site is."""

    name: SiteName = "a"
    """The site's name in the bucket, when a single site runs; the sites of a larger local run are a, b, c, ..."""

    backend: Literal["embedded", "prime-rl"] = "embedded"
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

    exact_join_s: float = Field(default=20.0, ge=0)
    """Seconds that a join may spend on whole masters. Over a link on which they would take longer, training begins from
    their upper halves, as bf16 holds them, and the lower ones come beside it."""

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
