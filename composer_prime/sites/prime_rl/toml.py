"""From a recipe to the TOML that PRIME-RL's `rl` reads, in the keys of one of its versions.

Recipes are written in the keys of 559b447; for 0.8.0 some move to its names. What it has no key for is refused.
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.config.paths import run_uri
from composer_prime.config.prime_rl import BUNDLED_TASKSETS, PrimeRecipe, with_none_words
from composer_prime.config.settings import sampling_seed
from composer_prime.errors import ConfigError
from composer_prime.sites.embedded.ports import HOST
from composer_prime.sites.prime_rl import settings
from composer_prime.sites.prime_rl.placement import Ports

LOSS_PATH = "composer_prime.sites.prime_rl.outer.loss"
STAMPING_ID = "composer-prime"
"""The id of `stamping_env`."""
PAIRS_ID = "composer-prime-pairs"
"""The id of the taskset of `pairs_env`."""
RUN_FOLDER = "prime-rl"
"""PRIME-RL's own run folder, inside the site's."""

Data = dict[str, Any]
_ABSENT = object()


OLDER, NEWER = VERSIONS = ("0.8.0", "559b447")
"""Those whose keys we know, as `prime_rl.version` names them."""
ORCHESTRATOR_FOLDER = {OLDER: "run_default", NEWER: "."}
"""Where the orchestrator keeps its checkpoints, in PRIME-RL's run folder."""

_VLLM_MODEL = (
    "dtype", "max_model_len", "enforce_eager", "trust_remote_code", "chat_template", "tool_call_parser",
    "reasoning_parser", "rope_scaling",
)  # fmt: skip
_VLLM_SERVER = (
    "data_parallel_size_local", "data_parallel_rpc_port", "api_server_count", "seed", "gpu_memory_utilization",
    "enable_prefix_caching", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules",
    "enable_expert_parallel", "all2all_backend", "enable_eplb", "enable_dbo", "enable_return_routed_experts",
)  # fmt: skip
_OLDER_NAMES = {
    "monitors.wandb": "wandb",
    "monitors.file": "file_monitor",
    "file_monitor.path": "file_monitor.filename",
    "monitors.prime": "orchestrator.prime_monitor",
    "orchestrator.prime_monitor.name": "orchestrator.prime_monitor.run_name",
    "orchestrator.concurrency.max_inflight": "orchestrator.max_inflight_episodes",
    **{f"inference.vllm.{key}": f"inference.model.{key}" for key in _VLLM_MODEL},
    "inference.vllm.tensor_parallel_size": "inference.parallel.tp",
    "inference.vllm.data_parallel_size": "inference.parallel.dp",
    **{f"inference.vllm.{key}": f"inference.{key}" for key in _VLLM_SERVER},
}
"""What 0.8.0 calls otherwise, in the order in which it is renamed."""
_OLDER_LACKS = (
    "monitors", "trainer.monitors", "orchestrator.monitors", "orchestrator.concurrency",
    "orchestrator.pad_to_multiple_of", "trainer.model.moe_fused_kernel",
)  # fmt: skip
"""What 0.8.0 has no word for; the rest of what it doesn't know is its own check's to refuse."""


@dataclass(frozen=True)
class SiteFiles:
    """What is decided about a site when it is rendered.

    site    its name
    folder  its own folder on this machine
    resume  the step of PRIME-RL's checkpoint to go on from; None: from the start
    clean   delete what a run without a checkpoint left in PRIME-RL's folder
    ports   its own, where several sites share this machine
    """

    site: str
    folder: Path
    resume: int | None = None
    clean: bool = False
    ports: Ports | None = None


def render(recipe: PrimeRecipe, version: str, files: SiteFiles) -> Data:
    """What `rl @ file.toml` shall read for one site, in that version's keys: JSON types without null.

    Raises ConfigError for a setting that the version has no key for.
    """
    data = deepcopy(recipe.upstream)
    data["max_steps"] = recipe.max_steps
    data["model"] = recipe.model.model_dump(mode="json")
    _put(data, "trainer.loss.type", "custom")
    _put(data, "trainer.loss.import_path", LOSS_PATH)
    for name, value in site_environment(recipe, files.site).items():
        _put(data, f"trainer.env_vars.{name}", value)
    if version == OLDER:
        _check_older_streams(data)
    _distil(data)
    _bound_pairs(data)
    data.setdefault("orchestrator", {})
    if recipe.outer is not None and data.get("inference") is not None:
        _put_new(data, "inference.vllm.seed", sampling_seed(recipe, files.site) % 2**31)
    if is_one_node(recipe):
        _keep_local(data)
    if files.ports is not None:
        _assign_ports(data, files.ports, recipe.broadcast)
    if version == OLDER:
        _rename_for_older(data)
    _place(data, recipe, files, version)
    return with_none_words(data)


def site_environment(recipe: PrimeRecipe, site: str) -> dict[str, str]:
    """What the trainer's hook reads; empty without an outer loop. Names, never credentials."""
    uri = run_uri(recipe)
    if uri is None:
        return {}
    key_file = recipe.site.key_file
    key = {} if key_file is None else {settings.KEY: str(key_file.expanduser().absolute())}
    same = {settings.SAME_NAME: "refuse"} if recipe.site.same_name == "refuse" else {}
    limits = {settings.MBIT_UP: recipe.site.max_mbit_up, settings.MBIT_DOWN: recipe.site.max_mbit_down}
    caps = {name: str(mbit) for name, mbit in limits.items() if mbit is not None}
    return {settings.OUTER: uri, settings.SITE: site, **key, **same, **caps}


def _check_older_streams(data: Data) -> None:
    """Raise ConfigError for a source of ours, whose numbers 0.8.0 has no place for."""
    for source in _sources(data, "train.source"):
        for name, id, stream in (("env.id", STAMPING_ID, "teachers and hints"), ("env.taskset.id", PAIRS_ID, "pairs")):
            if _get(source, name) == id:
                raise _lacks(f"place for {stream} ({name} = {id})", "drop the source")


def _rename_for_older(data: Data) -> None:
    """Spell everything as 0.8.0 does, in place. Raises ConfigError for what it has no key for."""
    for name, older in _OLDER_NAMES.items():
        value = _take(data, name)
        if value is not _ABSENT:
            _put(data, older, value)
    if vllm := _take(data, "inference.vllm", None):
        _put(data, "inference.vllm_extra", vllm)
    url = _get(data, "orchestrator.model.client.base_url")
    if isinstance(url, str):
        _put(data, "orchestrator.model.client.base_url", [url])
    for name in _OLDER_LACKS:
        if left := _take(data, name, None):
            raise _lacks(f"{name}.{next(iter(left))}" if isinstance(left, dict) else name, "drop the key")
    if _take(data, "orchestrator.train.filter_zero_advantages") is False:
        raise _lacks("orchestrator.train.filter_zero_advantages = false", "drop the key")
    for sources in ("train.source", "eval.source"):
        for source in _sources(data, sources):
            if (named := _get(source, "env.taskset.id")) in BUNDLED_TASKSETS:
                source.setdefault("name", named)
                source["env"]["taskset"]["id"] = f"{named}-v1"


def _distil(data: Data) -> None:
    """Say `[trainer.distill]`, which PRIME-RL hasn't got, to the trainer and to the sources that teachers stamp.

    Without the table, or at its top_k = 0, no distributions are asked for, and the trainer is told nothing. Raises
    ConfigError for what the environment, which PRIME-RL reads first of all, can't see by itself.
    """
    table = _take(data, "trainer.distill", None)
    config = None if table is None else settings.check_distill(table)
    top_k = 0 if config is None else config.top_k
    sources = [one for one in _sources(data, "train.source") if _get(one, "env.id") == STAMPING_ID]
    num_sources = max(len(_sources(data, "train.source")), 1)
    batch = (_get(data, "orchestrator.batch_size") or 0) // num_sources
    for source in sources:
        own = source["env"].get("top_k", top_k)
        if own != top_k:
            raise ConfigError(
                f"orchestrator.train.source {source.get('name')}: env.top_k ({own}) must be trainer.distill.top_k "
                f"({top_k}), which all sources and the trainer share: drop it, and set that"
            )
        if (hints := source["env"].get("hints")) is not None:
            settings.check_hints(hints, top_k, str(source.get("name")))
        size = {"rollouts": data["max_steps"] * batch, "batch": batch}
        source["env"] = size | source["env"] | ({"top_k": top_k} if top_k else {})
    if config is None or not top_k:
        return
    widths = {str(source.get("name")): _num_streams(source["env"]) for source in sources}
    if len({*widths.values()}) > 1:
        one, two = min(widths, key=widths.__getitem__), max(widths, key=widths.__getitem__)
        raise ConfigError(
            f"orchestrator.train.source {one} stamps {widths[one]} stream and {two} {widths[two]}, which PRIME-RL "
            "can't pack into one batch: give both sources env.teachers and env.hints, or both only one of these"
        )
    sampled_tau = _get(data, "trainer.loss.kwargs.replay_tau")
    if sampled_tau:
        raise ConfigError(
            f"trainer.loss.kwargs.replay_tau ({sampled_tau}) is for teachers that give one number a token: set "
            "trainer.distill.replay_tau in its place, or drop [trainer.distill]"
        )
    temperature = _get(data, "orchestrator.train.sampling.temperature")
    if temperature not in (None, 1, 1.0):
        raise ConfigError(
            f"orchestrator.train.sampling.temperature ({temperature}) must be 1 with [trainer.distill], whose teachers "
            "speak at temperature 1: set it so, or drop [trainer.distill]"
        )
    if _get(data, "trainer.enable_router_replay"):
        raise ConfigError(
            "trainer.enable_router_replay must be off with [trainer.distill], whose candidates ride in its field: turn "
            "it off, or drop [trainer.distill]"
        )
    _put(data, f"trainer.env_vars.{settings.DISTILL}", config.model_dump_json())


def _bound_pairs(data: Data) -> None:
    """Tell the sources of stored pairs how long a sample may be. Raises ConfigError where it is more than PRIME-RL's,
    for an algorithm whose advantages aren't the rewards, and for router replay."""
    row, shared = data.get("seq_len", _get(data, "trainer.model.seq_len")), _get(data, "orchestrator.algo.type")
    for source in _sources(data, "train.source"):
        if _get(source, "env.taskset.id") != PAIRS_ID:
            continue
        if _get(data, "trainer.enable_router_replay"):
            raise ConfigError(
                f"trainer.enable_router_replay must be off with env.taskset.id = {PAIRS_ID}, since no router chose "
                "experts for stored pairs: turn it off, or drop the source"
            )
        algorithm = _get(source, "algo.type") or shared or "grpo"
        if algorithm != "grpo":
            raise ConfigError(
                f'orchestrator.train.source {source.get("name")}: algo.type ("{algorithm}") must be "grpo" for pairs, '
                "whose rewards it takes as advantages: set it for this source"
            )
        own = source["env"].setdefault("seq_len", row) if row is not None else None
        if isinstance(own, int) and isinstance(row, int) and own > row:
            raise ConfigError(
                f"orchestrator.train.source {source.get('name')}: env.seq_len ({own}) must be at most seq_len "
                f"({row}), or pairs are cut: drop it"
            )


def _num_streams(env: Data) -> int:
    """How many streams the stamping environment gives each token, where it gives distributions."""
    return 2 if env.get("teachers") and env.get("hints") is not None else 1


def _place(data: Data, recipe: PrimeRecipe, files: SiteFiles, version: str) -> None:
    """Say where the run lies, what it is called, and whether it goes on."""
    if version == NEWER:
        data["output_dir"] = str(files.folder)
        data["run"] = {"name": f"{recipe.run.name}-{files.site}", "dir": RUN_FOLDER}
        if files.resume is not None:
            data["resume"] = {"step": files.resume}
        if files.clean:
            data["clean"] = True
        return
    data["output_dir"] = str(files.folder / RUN_FOLDER)
    if isinstance(data.get("wandb"), dict):
        data["wandb"].setdefault("name", f"{recipe.run.name}-{files.site}")
    if files.resume is not None:
        _put(data, "ckpt.resume_step", files.resume)
    if files.clean:
        data["clean_output_dir"] = True


def is_one_node(recipe: PrimeRecipe) -> bool:
    """Whether all processes of a site run on one machine."""
    several = ("multi_node", "disaggregated")
    kinds = (recipe.upstream_value(f"{table}deployment.type") for table in ("", "inference."))
    return not any(kind in several for kind in kinds)


def _keep_local(data: Data) -> None:
    """Upstream listens on all addresses by default, with routes that pause the engine and change its weights."""
    if data.get("inference") is not None:
        _put_new(data, "inference.server.host", HOST)
    if _get(data, "trainer.metrics_server") is not None:
        _put_new(data, "trainer.metrics_server.host", HOST)


def _assign_ports(data: Data, ports: Ports, broadcast: str) -> None:
    if data.get("inference") is not None:
        _put(data, "inference.server.port", ports.server)
        _put(data, "inference.backend_port", ports.backend)
        _put(data, "inference.vllm.data_parallel_rpc_port", ports.data_parallel)
    _put(data, "orchestrator.model.client.base_url", f"http://localhost:{ports.server}/v1")
    _put(data, "orchestrator.env_server_base_port", ports.env_servers)
    if broadcast != "filesystem":
        _put_new(data, "weight_broadcast.type", "nccl")
        _put(data, "weight_broadcast.port", ports.weights)
    if _get(data, "rollout_transport.type") != "filesystem":
        _put_new(data, "rollout_transport.type", "zmq")
        _put(data, "rollout_transport.port", ports.rollouts)


def _lacks(name: str, remedy: str) -> ConfigError:
    return ConfigError(f"PRIME-RL {OLDER} has no {name}: {remedy}, or install a newer one")


# --- dotted names ----------------------------------------------------------------------------------------------------


def _get(data: Data, name: str) -> Any:
    node: Any = data
    for part in name.split("."):
        if not isinstance(node, dict):
            return None
        node = node.get(part)
    return node


def _sources(data: Data, name: str) -> list[Data]:
    """The orchestrator's sources there; what is none is PRIME-RL's to refuse."""
    found = _get(data, f"orchestrator.{name}")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _put(data: Data, name: str, value: Any) -> None:
    *tables, last = name.split(".")
    for part in tables:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{part} ({data}) must be a table, since {name} is set: correct it")
    data[last] = value


def _put_new(data: Data, name: str, value: Any) -> None:
    if _get(data, name) is None:
        _put(data, name, value)


def _take(data: Data, name: str, default: Any = _ABSENT) -> Any:
    """The value at a name, which goes; `default` where there is none."""
    table, _, last = name.rpartition(".")
    holder = _get(data, table) if table else data
    return holder.pop(last, default) if isinstance(holder, dict) else default
