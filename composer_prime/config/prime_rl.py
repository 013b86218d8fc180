"""The recipe of a run whose sites are real PRIME-RLs: our tables, and PRIME-RL's own, which pass through as they stand.

Keys are those of prime_rl.configs at 559b447; `sites/prime_rl/toml.py` spells them as the installed version does. Here
is refused what composer-prime decides itself, and what must not be written to a disk.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from composer_prime.config.recipe import ModelConfig, RecipeBase
from composer_prime.config.table import OpenTable, Table, shared

UPSTREAM_TABLES = (
    "trainer", "orchestrator", "inference", "env_vars", "log", "ckpt", "monitors", "tokenizer", "seq_len",
    "weight_broadcast", "rollout_transport", "deployment", "slurm",
)  # fmt: skip
"""PRIME-RL's top-level keys that a recipe may set, beside those it shares with ours (run, model, max_steps)."""

OWNED = {
    **dict.fromkeys(
        ("trainer.loss.type", "trainer.loss.import_path"),
        "this backend's loss is composer_prime's: drop the key, and name another in trainer.loss.kwargs.inner",
    ),
    "trainer.loss.kwargs.outer": "the run is outer.store and run.name: set those",
    "trainer.loss.kwargs.site": "each site has its own name: drop the key",
    "dry_run": "drop the key, and say --dry-run",
    **dict.fromkeys(
        ("resume", "ckpt.resume_step", "trainer.resume", "orchestrator.resume"),
        "composer-prime run and site set it: drop the key, and say --resume where you want to go on",
    ),
    **dict.fromkeys(
        ("ckpt.output_dir", "trainer.ckpt.output_dir", "orchestrator.ckpt.output_dir"),
        "checkpoints lie in the site's own folder, which --resume and --dry-run clean: set output_dir",
    ),
    **dict.fromkeys(
        ("trainer.output_dir", "orchestrator.output_dir"), "the run's folder is output_dir/run.name: set those"
    ),
    **dict.fromkeys(("trainer.max_steps", "orchestrator.max_steps"), "it is the same for all: set max_steps"),
}
"""Keys of PRIME-RL that composer-prime sets by itself, and the remedy."""
LOSS_PATHS = ("composer_prime.sites.prime_rl.outer.loss", "composer_prime.sites.prime_rl.loss.composer_loss")
_AS_RENDERED = {"trainer.loss.type": ("custom",), "trainer.loss.import_path": LOSS_PATHS}
"""What may stand at some of those nevertheless, since it is what is rendered."""

PORTS = (
    "inference.server.port", "inference.backend_port", "inference.vllm.data_parallel_rpc_port",
    "orchestrator.model.client.base_url", "orchestrator.model.client.admin_base_url",
    "orchestrator.env_server_base_port", "rollout_transport.port", "weight_broadcast.port",
)  # fmt: skip
"""Keys that composer-prime sets where several sites share this machine."""

BROADCAST_TIMEOUT_S = 1200
"""PRIME-RL's default of weight_broadcast.timeout."""

ENV_PREFIX = "COMPOSER_PRIME_"
SECRET_ENDINGS = ("_KEY", "_SECRET", "_TOKEN", "_PASSWORD", "_ACCESS_KEY_ID")
"""Environment variables that end so hold credentials: they reach a site by its environment alone."""

BUNDLED_TASKSETS = (
    "alphabet-sort", "general-agent", "gsm8k", "math-env", "math500", "r2e-gym", "reverse-text", "scaleswe",
    "swebench-verified", "wiki-search", "wordle",
)  # fmt: skip
"""Tasksets that come with PRIME-RL; up to v0.8.0 their names ended in -v1."""

_ABSENT = object()


@dataclass(frozen=True)
class Layout:
    """GPUs of one site on its machine: `train` for the trainer, `infer` for its inference server, if it starts one."""

    train: int
    infer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.train + self.infer


class PrimeRlConfig(Table):
    """`[prime_rl]`: the PRIME-RL that runs the sites."""

    version: Literal["auto", "0.8.0", "559b447"] = shared("auto")
    """The version whose keys are written; "auto" asks the installed one. A launch without an image takes this one."""

    command: tuple[str, ...] = Field(default=("rl",), min_length=1)
    """PRIME-RL's entrypoint, as a list of words: a name on the PATH, a path, or `uv run --no-sync rl`."""

    first_port: int = Field(default=12000, ge=1024, le=40000)
    """First of the ports, 200 for each site, where several sites share this machine."""


class PrimeModelConfig(ModelConfig, OpenTable):
    """`[model]`: the policy; further keys are PRIME-RL's."""

    model_config = ConfigDict(extra="allow")

    name: str = shared(min_length=1)
    """A Hugging Face id or a local folder."""


class PrimeRecipe(RecipeBase):
    """One run of PRIME-RL sites; what isn't ours is kept as it stands, for PRIME-RL to check."""

    model_config = ConfigDict(extra="allow")

    model: PrimeModelConfig = shared()
    prime_rl: PrimeRlConfig = shared(PrimeRlConfig())

    @property
    def upstream(self) -> dict[str, Any]:
        """PRIME-RL's own tables, as the recipe has them."""
        return self.model_extra or {}

    def upstream_value(self, name: str, default: Any = None) -> Any:
        """What stands at a dotted name of PRIME-RL's tables; `default` where nothing does."""
        found = _at(self.upstream, name)
        return default if found is _ABSENT else found

    @property
    def taskset_ids(self) -> tuple[str, ...]:
        """Of all its environments, those of evaluations too, in both of PRIME-RL's spellings."""
        found = []
        for name in ("train.source", "eval.source", "train.env", "eval.env"):
            sources = self.upstream_value(f"orchestrator.{name}")
            for source in sources if isinstance(sources, list) else ():
                places = ("taskset.id", "env.taskset.id") if isinstance(source, dict) else ()
                found += [_at(source, place) for place in places]
        return tuple(each for each in found if isinstance(each, str))

    @property
    def layout(self) -> Layout:
        """The GPUs that `[deployment]` asks for on one node."""
        infer = 0 if self.upstream.get("inference") is None else self.upstream_value("deployment.num_infer_gpus", 1)
        return Layout(self.upstream_value("deployment.num_train_gpus", 1), infer)

    @property
    def needed_gpus(self) -> int:
        """As in `RecipeBase`."""
        return self.layout.total

    @property
    def broadcast(self) -> str:
        """How weights go to inference; PRIME-RL decides where the recipe doesn't say."""
        on_disk = self.upstream.get("inference") is None or self.upstream_value("trainer.model.lora") is not None
        return self.upstream_value("weight_broadcast.type") or ("filesystem" if on_disk else "nccl")

    @property
    def step_tokens(self) -> int | None:
        """As in `RecipeBase`; None where batch or row length is left to PRIME-RL."""
        tokens = self.upstream_value("orchestrator.token_batch_size")
        rollouts, row = self.upstream_value("orchestrator.batch_size"), self.upstream_value("seq_len")
        if isinstance(tokens, int):
            return tokens
        return rollouts * row if isinstance(rollouts, int) and isinstance(row, int) else None

    def to_data(self) -> dict[str, Any]:
        """The recipe as JSON types; PRIME-RL's cleared settings are its word for null, which TOML lacks."""
        data = self.model_dump(mode="json", exclude_none=True)
        return {**data, **{key: with_none_words(value) for key, value in self.upstream.items()}}

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        for name in self.upstream:
            if name not in (*UPSTREAM_TABLES, *OWNED):
                known = [*type(self).model_fields, *UPSTREAM_TABLES]
                close = difflib.get_close_matches(name, known, n=1)
                remedy = f"did you mean {close[0]}?" if close else f"remove it, or use one of {', '.join(known)}"
                raise ValueError(f"{name} isn't a known key: {remedy}")
        return self

    @model_validator(mode="after")
    def _check_owned(self) -> Self:
        for name, remedy in OWNED.items():
            value = _at(self.upstream, name)
            if value is not _ABSENT and value not in _AS_RENDERED.get(name, ()):
                raise ValueError(f'{name} ({value}) can\'t be set with site.backend "prime-rl": {remedy}')
        if self.sites.count > 1 and self.upstream.get("slurm") is None:
            for name in PORTS:
                value = _at(self.upstream, name)
                if value is not _ABSENT:
                    raise ValueError(
                        f"{name} ({value}) can't be set with sites.count ({self.sites.count}), since each site needs "
                        "ports of its own: drop the key, or move them all with prime_rl.first_port"
                    )
        return self

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if self.site.device != "cpu":
            raise ValueError(
                f'site.device ("{self.site.device}") can\'t be set with site.backend "prime-rl", whose GPUs '
                "[deployment] counts: drop the key"
            )
        return self

    @model_validator(mode="after")
    def _check_env_vars(self) -> Self:
        for place, name in _env_vars(self.upstream):
            if name.startswith(ENV_PREFIX):
                raise ValueError(
                    f'{place}.{name} can\'t be set with site.backend "prime-rl", which sets it from outer.store, '
                    "run.name and site: drop the key"
                )
            if name.endswith(SECRET_ENDINGS):
                raise ValueError(
                    f"{place}.{name} would be written into files, and credentials belong in none: drop the key, and "
                    f"export {name} where the site is started"
                )
        return self

    @model_validator(mode="after")
    def _check_slurm(self) -> Self:
        """PRIME-RL's job runs `uv sync` on every node then, and pre_run_command, which installs us, on the first."""
        local = self.upstream_value("slurm.shared_fs") is False
        if not local or self.upstream_value("deployment.type") != "multi_node":
            return self
        everywhere = "srun" in str(self.upstream_value("slurm.pre_run_command", ""))
        paths = (self.upstream_value(f"{table}.PYTHONPATH") for table in ("env_vars", "trainer.env_vars"))
        if not everywhere and not any(paths):
            raise ValueError(
                "slurm.shared_fs (false) gives each node an environment of its own, and slurm.pre_run_command installs "
                'composer-prime on the first alone: write srun --ntasks-per-node=1 bash -c "..." around it, or set '
                "trainer.env_vars.PYTHONPATH to a folder that all nodes see and that uv pip install --target has filled"
            )
        return self

    @model_validator(mode="after")
    def _check_outer(self) -> Self:
        if self.outer and self.upstream_value("trainer.model.full_offload"):
            raise ValueError(
                "trainer.model.full_offload must be off with an outer loop, which can't move weights that the "
                "optimizer holds: use trainer.model.optim_cpu_offload or fsdp_cpu_offload"
            )
        timeout = self.upstream_value("weight_broadcast.timeout", BROADCAST_TIMEOUT_S)
        older = self.prime_rl.version == "0.8.0"  # it has no such limit
        timed = not older and self.broadcast != "filesystem" and isinstance(timeout, int | float)
        if self.outer and timed and self.outer.grace_s >= timeout:
            raise ValueError(
                f"outer.grace_s ({self.outer.grace_s:g}) must be smaller than weight_broadcast.timeout ({timeout}), "
                "the seconds that PRIME-RL's orchestrator waits for the last broadcast, which comes after a round: "
                "lower grace_s, or raise the timeout by two training steps at least"
            )
        return self


def with_none_words(data: Any) -> Any:
    """The data with null made the text "None", as PRIME-RL reads it from TOML."""
    if isinstance(data, dict):
        return {key: with_none_words(value) for key, value in data.items()}
    if isinstance(data, list):
        return [with_none_words(value) for value in data]
    return "None" if data is None else data


def _at(data: Any, name: str) -> Any:
    for part in name.split("."):
        if not isinstance(data, dict) or part not in data:
            return _ABSENT
        data = data[part]
    return data


def _env_vars(data: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """(table, variable) of every table of environment variables, wherever it stands."""
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        name = f"{place}.{key}" if place else key
        if key.endswith("env_vars") and isinstance(value, dict):
            yield from ((name, variable) for variable in value)
        else:
            yield from _env_vars(value, name)
