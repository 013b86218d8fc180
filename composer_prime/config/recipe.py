"""The recipe: a PRIME-RL TOML plus our tables, as one frozen record that needs no torch.

Where PRIME-RL has a setting we use its name (prime_rl.configs at 559b447), so that a recipe reads the same in both.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from composer_prime.config.distill import DistillConfig, is_off
from composer_prime.config.outer import TOPK_ROUNDS, LaunchConfig, MonitorsConfig, OuterConfig, SiteConfig, SitesConfig
from composer_prime.config.table import OpenTable, RunName, Table, shared
from composer_prime.config.teachers import HintsConfig, ReplayConfig

TINY = "tiny"
TINY_MODELS = (TINY, "tiny-sort", "small-sort", "tiny-tools", "small-tools")
"""Made and warmed up on the spot: some answer with letters, others call tools. Those called small are for a GPU."""
MAKER = "tiny_policy"
"""The package that makes these, in envs/."""


class RunConfig(Table):
    """`[run]`"""

    name: RunName = shared()
    """The run's folder under output_dir, and its prefix in the bucket."""

    seed: int = shared(default=0, ge=0, lt=2**32)
    """Seed of everything drawn at random: the tiny model and its warm-up at all sites, sampling per site."""


class ModelConfig(Table):
    """`[model]`"""

    name: str = shared(default="tiny", min_length=1)
    """One of TINY_MODELS, a local folder, or a Hugging Face id."""


class TasksetConfig(OpenTable):
    """`[orchestrator.train.source.env.taskset]`: further keys go to the taskset, which checks them."""

    id: str = shared(min_length=1)
    """The environment's package: `my-env` imports `my_env`."""


def module_of(taskset_id: str) -> str:
    """The module that verifiers imports for a taskset's id, such as `my_env` for "owner/my-env@1.0"."""
    return taskset_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


class HarnessConfig(Table):
    """`[orchestrator.train.source.env.agent.harness]`"""

    id: str = shared(default="chat", min_length=1)
    """What plays the rollout: "chat" talks to the policy and calls tools inside the orchestrator; others are verifiers'
    own."""

    tool_timeout: float = shared(default=60.0, gt=0, le=3600)
    """Seconds that one call of a tool may take; after them the rollout fails."""


class RuntimeConfig(Table):
    """`[orchestrator.train.source.env.agent.runtime]`"""

    type: Literal["subprocess"] = shared("subprocess")
    """Where a rollout runs. Spelled out because verifiers' own default is a paid remote sandbox."""


class AgentConfig(Table):
    """`[orchestrator.train.source.env.agent]`"""

    harness: HarnessConfig = shared(HarnessConfig())
    runtime: RuntimeConfig = shared(RuntimeConfig())

    max_turns: int | None = shared(default=None, ge=1, le=10**6)
    """Turns of the policy in one rollout; it ends after them, and is rewarded as it stands. None: no limit."""

    max_total_tokens: int | None = shared(default=None, ge=1)
    """Tokens of one rollout's conversation; looked at between turns, as `max_turns` is. None: no limit."""


class EnvConfig(Table):
    """`[orchestrator.train.source.env]`"""

    taskset: TasksetConfig = shared()
    agent: AgentConfig = shared(AgentConfig())


class SourceConfig(Table):
    """`[[orchestrator.train.source]]`: one environment to train on."""

    name: str = shared(min_length=1)
    """The source's name in metrics and batches."""

    env: EnvConfig = shared()


class SamplingConfig(Table):
    """`[orchestrator.train.sampling]`"""

    temperature: float = shared(default=1.0, gt=0, le=2)
    """Sampling temperature; log-probabilities are taken after it."""

    max_completion_tokens: int = shared(default=16, ge=1, le=2**22)
    """Tokens a turn may generate."""


class TrainConfig(Table):
    """`[orchestrator.train]`"""

    source: tuple[SourceConfig, ...] = shared(())
    """The environments; every step takes prompts from each in turn. None: a run learns from stored sessions alone."""
    sampling: SamplingConfig = shared(SamplingConfig())

    filter_zero_advantages: bool = shared(True)
    """Leave out samples of groups whose rewards are all equal: they have no gradient."""


class AlgoConfig(Table):
    """`[orchestrator.algo]`"""

    type: Literal["grpo"] = shared("grpo")
    """Advantage of a rollout: its reward minus the mean of its group."""


class RendererConfig(OpenTable):
    """`[orchestrator.renderer]`: further keys go to the renderer or the chat template, such as enable_thinking."""

    name: str = shared(default="auto", min_length=1)
    """How messages become tokens: a name of the renderers package; "default": by the model's own chat template; "auto":
    the package's renderer for this model where there is one, else its template."""

    tool_parser: str | None = shared(default=None, min_length=1)
    """What reads calls in answers, with the name "default": "qwen3", "qwen3.5", "glm", "deepseek-v3"; None: what the
    template shows."""

    accept_template_difference: bool = shared(False)
    """Train though the renderer writes otherwise than the model's own chat template."""


class OrchestratorConfig(Table):
    """`[orchestrator]`"""

    batch_size: int = shared(default=64, ge=1, le=2**20)
    """Rollouts a training step is made of."""

    group_size: int = shared(default=8, ge=2, le=2**16)
    """Rollouts of the same prompt, whose mean reward is the baseline."""

    max_off_policy_steps: int = shared(default=2, ge=0, le=10**4)
    """Training steps by which a rollout's policy may lag behind the one it trains; generation waits for newer ones.
    With 0 nothing is generated while a step trains: each learns from the very policy it moves."""

    algo: AlgoConfig = shared(AlgoConfig())
    renderer: RendererConfig = shared(RendererConfig())
    train: TrainConfig = shared(TrainConfig())

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.batch_size % self.group_size:
            raise ValueError(
                f"orchestrator.batch_size ({self.batch_size}) must be a multiple of orchestrator.group_size "
                f"({self.group_size}): try {-(-self.batch_size // self.group_size) * self.group_size}"
            )
        return self


class OptimConfig(Table):
    """`[trainer.optim]`"""

    type: Literal["adamw", "muon"] = shared("adamw")
    """The inner optimizer. "muon" moves matrices by their orthogonalized momentum, and what is no matrix, embeddings
    and the head as "adamw" does."""

    lr: float = shared(default=1e-6, ge=0, le=10)
    """Inner learning rate."""

    weight_decay: float = shared(default=0.01, ge=0, le=100)
    """Decoupled weight decay."""

    mu: float = shared(default=0.95, ge=0, lt=1)
    """Decay of Muon's momentum."""

    betas1: float = shared(default=0.9, ge=0, lt=1)
    """beta_1: decay of the first moment."""

    betas2: float = shared(default=0.999, ge=0, lt=1)
    """beta_2: decay of the second moment. PRIME-RL's default beside "muon" is 0.95."""

    max_norm: float | None = shared(default=1.0, gt=0)
    """Gradient norm to clip to; None: no clipping."""

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.type != "muon" and self.mu != type(self).model_fields["mu"].default:
            raise ValueError(
                f'trainer.optim.mu ({self.mu:g}) is for trainer.optim.type "muon", and it is "{self.type}": leave it '
                "out, or set the type"
            )
        return self


class SchedulerConfig(Table):
    """`[trainer.scheduler]`"""

    type: Literal["constant", "linear"] = shared("constant")
    """How the learning rate of `[trainer.optim]` changes. "linear": it rises in a line, stays, and falls in a line
    until the last step."""

    warmup_steps: int = shared(default=10, ge=0)
    """First steps, over which "linear" rises from `min_lr`."""

    decay_steps: int = shared(default=10, ge=0)
    """Last steps, over which "linear" falls to `min_lr`."""

    min_lr: float = shared(default=0.0, ge=0, le=10)
    """Learning rate at both ends of "linear"."""

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        for key, field in type(self).model_fields.items():
            if self.type == "constant" and key != "type" and getattr(self, key) != field.default:
                raise ValueError(
                    f'trainer.scheduler.{key} ({getattr(self, key):g}) is for trainer.scheduler.type "linear", and it '
                    'is "constant": leave it out, or set the type'
                )
        return self


class LossConfig(Table):
    """`[trainer.loss]`"""

    type: Literal["custom"] = shared("custom")
    """Upstream's word for a loss that is imported by path."""

    import_path: str = shared("composer_prime.losses.composer.composer_loss")
    """The function, as package.module.name."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, which names and bounds them."""

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if "." not in self.import_path or not all(part.isidentifier() for part in self.import_path.split(".")):
            raise ValueError(
                f"trainer.loss.import_path ({self.import_path}) must be package.module.function: give the full name"
            )
        return self


class TrainerConfig(Table):
    """`[trainer]`"""

    optim: OptimConfig = shared(OptimConfig())
    scheduler: SchedulerConfig = shared(SchedulerConfig())
    loss: LossConfig = shared(LossConfig())
    distill: DistillConfig = shared(DistillConfig())


class ServerConfig(Table):
    """`[inference.server]`"""

    port: int | None = Field(default=None, ge=1, le=65535)
    """Loopback port of the first site's server, the next sites take the ports after it; None: free ports."""


class InferenceConfig(Table):
    """`[inference]`"""

    engine: Literal["transformers", "vllm"] = shared("transformers")
    """What generates: our server on transformers, or a vLLM server."""

    python: Path | None = None
    """The interpreter that has vLLM, when it lives in an environment of its own; None: this one."""

    max_batch_size: int = shared(default=64, ge=1, le=2**16)
    """Sequences decoded together."""

    server: ServerConfig = ServerConfig()


class CheckpointConfig(Table):
    """`[ckpt]`"""

    interval: int = shared(default=10, ge=1)
    """Training steps between two local checkpoints, from which --resume continues."""


class RecipeBase(Table):
    """What a recipe says whatever trains its sites: the run, its outer loop, and where they are."""

    run: RunConfig = shared()
    max_steps: int = shared(ge=1)
    """Training steps of a site."""

    output_dir: Path = Path("outputs")
    """Folder that holds the run's folder."""

    clean: bool = False
    """Start over: delete the run's folder and its local bucket first."""

    model: ModelConfig = shared()
    outer: OuterConfig | None = shared(None)
    site: SiteConfig = shared(SiteConfig())
    sites: SitesConfig = SitesConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def rounds(self) -> int:
        """Rounds each fragment is trained for, max_steps // H; 0 without an outer loop."""
        return self.max_steps // self.outer.inner_steps if self.outer else 0

    @property
    def step_tokens(self) -> int | None:
        """Most tokens that a training step has: a row for each rollout; None where the recipe doesn't say."""
        return None

    @property
    def site_names(self) -> tuple[str, ...]:
        """The sites of a local run: site.name when there is one, else a, b, c, ..."""
        count = self.sites.count
        return (self.site.name,) if count == 1 else tuple(chr(ord("a") + i) for i in range(count))

    @property
    def declared_sites(self) -> tuple[str, ...]:
        """All sites that the recipe names: of those of a local run, and those of `[sites.overrides]`, the more."""
        return max(self.site_names, tuple(self.sites.overrides), key=len)

    @property
    def needed_gpus(self) -> int:
        """GPUs without which a site can't start."""
        return 0

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.outer and self.max_steps < self.outer.inner_steps:
            raise ValueError(
                f"max_steps ({self.max_steps}) must be at least outer.inner_steps ({self.outer.inner_steps}): "
                "train longer or sync more often"
            )
        return self

    def warnings(self) -> tuple[str, ...]:
        """What will work and is hardly meant, each in a line."""
        outer = self.outer
        if outer is None or outer.codec != "topk" or self.rounds >= TOPK_ROUNDS:
            return ()
        return (
            f'outer.codec "topk" sends a 64th of a movement each round and the rest later, and max_steps '
            f"({self.max_steps}) gives {self.rounds} rounds at outer.inner_steps ({outer.inner_steps}): what isn't "
            f'sent at the end is lost. Train for {TOPK_ROUNDS} rounds or more, or use outer.codec "int4"',
        )

    def to_data(self) -> dict[str, Any]:
        """The recipe as JSON types, without the settings that are None; reads back to an equal recipe."""
        return self.model_dump(mode="json", exclude_none=True)


class Recipe(RecipeBase):
    """One run of embedded sites, as every site of it reads it."""

    model: ModelConfig = shared(ModelConfig())
    seq_len: int = shared(default=512, ge=8, le=2**22)
    """Tokens in a row of a training batch, and the most a sample may have."""

    orchestrator: OrchestratorConfig = shared(OrchestratorConfig())
    trainer: TrainerConfig = shared(TrainerConfig())
    inference: InferenceConfig = shared(InferenceConfig())
    ckpt: CheckpointConfig = shared(CheckpointConfig())
    monitors: MonitorsConfig = MonitorsConfig()
    replay: ReplayConfig = shared(ReplayConfig())
    hints: HintsConfig | None = shared(None)

    @property
    def needed_gpus(self) -> int:
        """As in `RecipeBase`."""
        return int(self.site.device == "cuda")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        tokens = self.orchestrator.train.sampling.max_completion_tokens
        if tokens >= self.seq_len:
            raise ValueError(
                f"orchestrator.train.sampling.max_completion_tokens ({tokens}) must be smaller than seq_len "
                f"({self.seq_len}): lower it, or raise seq_len so that the prompt fits too"
            )
        return self

    @model_validator(mode="after")
    def _check_scheduler(self) -> Self:
        scheduler = self.trainer.scheduler
        if scheduler.type == "linear":
            steps = scheduler.warmup_steps + scheduler.decay_steps
            if not 0 < steps <= self.max_steps:
                raise ValueError(
                    f"trainer.scheduler.warmup_steps ({scheduler.warmup_steps}) + decay_steps "
                    f"({scheduler.decay_steps}) must be between 1 and max_steps ({self.max_steps}): change one of them"
                )
            if scheduler.min_lr > self.trainer.optim.lr:
                raise ValueError(
                    f"trainer.scheduler.min_lr ({scheduler.min_lr:g}) must be at most trainer.optim.lr "
                    f"({self.trainer.optim.lr:g}): lower it"
                )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.site.device != "cpu" and self.inference.engine == "vllm":
            raise ValueError(
                f'site.device ("{self.site.device}") can\'t be set with inference.engine "vllm", which generates where '
                "its own build does: use the transformers engine, or drop the key"
            )
        if self.inference.engine == "vllm" and self.replay.pairs is not None and self.replay.pairs.has_reference:
            raise ValueError(
                'replay.pairs.loss ("dpo") needs a server that holds two models, and inference.engine = "vllm" holds '
                'one: use "simpo", or tau = 0, or the transformers engine'
            )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        names = [source.name for source in self.orchestrator.train.source]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"orchestrator.train.source names must differ, but {', '.join(twice)} is given "
                f"{names.count(twice[0])} times: rename one"
            )
        if not names and (self.has_streams or self.replay.pairs is self.replay.traces is None):
            raise ValueError(
                "orchestrator.train.source names no environment: add one, which hints and replay.teachers need, or "
                "stored sessions to learn from alone, in [replay.pairs]"
            )
        return self

    @model_validator(mode="after")
    def _check_streams(self) -> Self:
        if not self.has_streams:
            return self
        temperature = self.orchestrator.train.sampling.temperature
        if temperature != 1.0:
            raise ValueError(
                f"orchestrator.train.sampling.temperature ({temperature:g}) must be 1 with replay.teachers or hints, "
                "whose logprobs are taken at temperature 1: set it to 1"
            )
        self._check_weights()
        return self

    def _check_weights(self) -> None:
        """A stream has a weight above 0, and of the kind that its teachers' answers need."""
        loss, distill = self.trainer.loss, self.trainer.distill
        sampled_taus = {name: tau for name in ("replay_tau", "ref_kl_tau") if (tau := loss.kwargs.get(name, 0))}
        if distill.top_k and sampled_taus:
            name, tau = next(iter(sampled_taus.items()))
            raise ValueError(
                f"trainer.loss.kwargs.{name} ({tau}) is for teachers that give one number a token: set "
                "trainer.distill.replay_tau in its place, or trainer.distill.top_k = 0"
            )
        streams = {"hint_tau": self.hints is not None, "replay_tau": bool(self.replay.teachers)}
        asked = [name for name, is_asked in streams.items() if is_asked]
        if distill.top_k and all(is_off(getattr(distill, name)) for name in asked):
            raise ValueError(
                f"trainer.distill.{' and '.join(asked)} (0) must not be 0 at every step, or nothing is learned from "
                "teachers that are asked: set one above 0, or take hints and replay.teachers out"
            )
        if self.hints is not None and self.hints.is_held and self.inference.engine == "vllm":
            raise ValueError(
                'hints.teacher ("ema") needs a server that holds two models, and inference.engine = "vllm" holds one: '
                'use the transformers engine, or teacher = "frozen" with a base_url'
                if self.hints.teacher == "ema"
                else 'hints.base_url must be given with inference.engine = "vllm", whose server holds one policy: '
                "serve the first one on a server of its own, or use the transformers engine"
            )
        if not distill.top_k and self.hints is not None:
            raise ValueError("trainer.distill.top_k (0) must be at least 1 with hints, which one number doesn't teach")
        if not distill.top_k and loss.import_path.endswith(".composer_loss") and not sampled_taus:
            raise ValueError(
                "trainer.loss.kwargs.replay_tau (0) must be above 0 with replay.teachers and trainer.distill.top_k = "
                "0, or nothing uses their numbers: set it, such as 0.1, or ref_kl_tau, or top_k = 8"
            )

    @property
    def step_tokens(self) -> int | None:
        """As in `RecipeBase`."""
        return self.orchestrator.batch_size * self.seq_len

    @property
    def holds_first_policy(self) -> bool:
        """Whether a site's own server holds the run's first policy beside the one that learns: as hints' teacher, or
        as what DPO compares with."""
        is_teacher = self.hints is not None and self.hints.teacher == "frozen" and self.hints.is_held
        return is_teacher or (self.replay.pairs is not None and self.replay.pairs.has_reference)

    @property
    def has_streams(self) -> bool:
        """Whether rollouts are stamped with teachers' logprobs."""
        return bool(self.replay.teachers) or self.hints is not None
