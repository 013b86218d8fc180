"""What the recipe in an invitation may hold: every key by name, with its kind and its range. All else is refused.

Numbers, flags and names from closed lists choose nothing that runs and reach no file. What remains are names: of a
model, environments and harnesses, and texts for those; the volunteer's word is asked for where code is meant.
"""

import math
import re
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from composer_prime.config.distill import MAX_K, DistillConfig
from composer_prime.config.outer import OuterConfig
from composer_prime.config.prime_rl import LOSS_PATHS, PrimeRlConfig
from composer_prime.config.recipe import TINY_MODELS
from composer_prime.config.table import RUN_NAME, SITE_NAME
from composer_prime.config.teachers import HINT_FIELDS, HintKind, OutcomeKind
from composer_prime.volunteers.places import is_public_url

LOSSES = ("composer_prime.losses.composer.composer_loss",)
"""Functions that an invitation may name as the loss: our own."""
INNER_LOSSES = ("composer_loss", "default", "ipo", "icepop", "ppo", "cispo")
"""What a PRIME-RL's loss may be by its name: our own, and those that PRIME-RL has or had itself. No path."""
RENDERERS = (
    "auto", "default", "qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "llama-3", "gpt-oss", "glm-4.5",
    "glm-5", "glm-5.1", "glm-5.3", "minimax-m2", "deepseek-v3", "deepseek-r1", "deepseek-v4", "hy3",
)  # fmt: skip
"""Those of the renderers package that are text alone. "custom" imports a path; others trust a model's own code;
"default" runs the model's chat template, in the sandbox of transformers."""
ENV_TASKSET = "orchestrator.train.source[].env.taskset"
AGENT = "orchestrator.train.source[].env.agent"
MOST_ENTRIES, MOST_EXTRAS = 32, 32
"""Of a list of tables, and of a taskset's own keys."""
OWN_ENDINGS = (
    "_dir", "_path", "_file", "_folder", "_command", "_url", "_host", "_port", "_var", "_vars", "_env", "_code",
    "_key", "_token", "_secret", "_password", "_passwd", "_credential", "_credentials",
)  # fmt: skip
"""A taskset's keys that end so (or are called so) would name what is the volunteer's: a file, an address, a secret."""
OWN_NAMES = ("task", "system_prompt")
"""verifiers' own, which every taskset has: a table of settings for its tasks, and a file."""

_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EXTRA_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .,+=-]{0,199}")


@dataclass(frozen=True)
class Rule:
    """What may stand at a key. says: that, for people; admits: whether a value read from TOML does."""

    says: str
    admits: Callable[[Any], bool]


@dataclass(frozen=True)
class Refusal:
    """A setting that no invitation may hold, as found; `str` is one line that shows it. limit '': no value is right."""

    name: str
    value: Any
    limit: str = ""

    def __str__(self) -> str:
        limit = f"must be {self.limit}" if self.limit else "no invitation may hold"
        return f"{shown_name(self.name)} to {shown(self.value)}, which {limit}"


def whole(low: int, high: int) -> Rule:
    """Whole numbers from low to high."""
    return Rule(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def real(low: float, high: float) -> Rule:
    """Numbers from low to high."""
    return Rule(
        f"a number from {low:g} to {high:g}",
        lambda value: type(value) in (int, float) and math.isfinite(value) and low <= value <= high,
    )


def one_of(*names: str) -> Rule:
    """One of some texts."""
    return Rule(f"one of {', '.join(names)}", lambda value: type(value) is str and value in names)


def text(pattern: "re.Pattern[str] | str", says: str) -> Rule:
    """Texts that match as a whole."""
    return Rule(says, lambda value: type(value) is str and re.fullmatch(pattern, value) is not None)


def _choices(model: type, field: str) -> Rule:
    """What a recipe's own table lists for a field."""
    return one_of(*get_args(model.model_fields[field].annotation))  # type: ignore[attr-defined]


def _is_package(value: Any) -> bool:
    is_name = type(value) is str and _PACKAGE.fullmatch(value) is not None
    return is_name and value.replace("-", "_") not in sys.stdlib_module_names


def _is_model(value: Any) -> bool:
    return type(value) is str and _MODEL.fullmatch(value) is not None and ".." not in value


def _is_template(value: Any) -> bool:
    """Text with {error} and {tool} alone in braces: a width or an attribute would be the owner's to choose."""
    if type(value) is not str or len(value) > 4000 or not (value.replace("\n", "").replace("\t", "")).isprintable():
        return False
    try:
        fields = list(string.Formatter().parse(value))
    except ValueError:
        return False
    return all(not spec and conversion is None for _, field, spec, conversion in fields if field is not None) and {
        field for _, field, _, _ in fields if field is not None
    } <= set(HINT_FIELDS)


def _is_plain(value: Any) -> bool:
    """A number, a flag, or a short text that spells no path, URL or address: at most a hub id's one slash."""
    if type(value) is str:
        return (_PLAIN.fullmatch(value) is not None or _MODEL.fullmatch(value) is not None) and ".." not in value
    return type(value) is bool or real(-1e12, 1e12).admits(value)


def _is_teacher(value: Any) -> bool:
    return type(value) is str and is_public_url(value)


FLAG = Rule("true or false", lambda value: type(value) is bool)
NO = Rule("false", lambda value: value is False)
MODEL = Rule(f"a model of the Hugging Face hub, org/name, or one of {', '.join(TINY_MODELS)}, and no folder", _is_model)
PACKAGE = Rule("a package's plain name (a to z, 0 to 9, - and _) that Python doesn't have itself", _is_package)
EXTRA = Rule("a number, true or false, or at most 200 letters, digits and _.,+=-, and no path or address", _is_plain)
TEACHER = Rule("https://host or http://host of a public server, without a user or query", _is_teacher)
TEMPLATE = Rule("at most 4,000 characters with {error} and {tool} alone in braces", _is_template)
PLAIN_NAME = text(r"[A-Za-z0-9][A-Za-z0-9_. -]{0,63}", "1 to 64 letters, digits, spaces and _.-")
COUNT, MANY = whole(1, 10**9), whole(1, 10**6)

_OUTER = {
    "inner_steps": MANY, "fragments": whole(1, 10**4), "sync_delay": whole(0, 10**6), "merge_alpha": real(0, 1),
    "pace": _choices(OuterConfig, "pace"), "inner_seconds": real(0, 1e6), "lr": real(0, 100), "momentum": real(0, 1),
    "codec": _choices(OuterConfig, "codec"), "merged_codec": _choices(OuterConfig, "merged_codec"),
    "error_feedback": FLAG, "gather_sites": whole(1, 10**4), "slices": whole(1, 1024), "quorum": whole(1, 10**4),
    "grace_s": real(0, 1e6), "liveness_s": real(0, 1e6), "weighting": _choices(OuterConfig, "weighting"),
    "aggregate": _choices(OuterConfig, "aggregate"), "clip": real(0, 1e6), "trim": real(0, 0.5),
    "guest_share": real(0, 0.5), "guest_clip": real(0, 1e6), "step_tokens": whole(1, 2**53),
    "committer": text(SITE_NAME, "a site's name"), "snapshot_rounds": MANY, "keep_log": FLAG, "max_stale_rounds": MANY,
}  # fmt: skip
_LOSS = {
    "dppo_mask_low": real(0, 1000), "dppo_mask_high": real(0, 1000), "adv_tau": real(0, 1000),
    "kl_tau": real(0, 1000), "replay_tau": real(0, 1000), "replay_clip": real(0, 1000), "ref_kl_tau": real(0, 1000),
    "ratio_cap": real(1, 1e6), "trust_region": one_of("dppo", "ipo", "icepop", "cispo"), "ipo_threshold": real(0, 1000),
    "ratio_low": real(0, 1000), "ratio_high": real(0, 1000), "score_centering": FLAG,
}  # fmt: skip
"""composer_loss's keyword arguments."""
_DISTILL = {
    "top_k": whole(0, MAX_K), "divergence": _choices(DistillConfig, "divergence"), "jsd_alpha": real(0, 1),
    **{f"{name}_tau{part}": real(0, 1000) for name in ("hint", "replay") for part in ("", ".start", ".end")},
    **{f"{name}_tau.steps": COUNT for name in ("hint", "replay")},
}  # fmt: skip

_SHARED: Mapping[str, Rule] = {
    "max_steps": COUNT,
    "seq_len": whole(8, 2**22),
    "run.name": text(RUN_NAME, "a run's name"),
    "run.seed": whole(0, 2**32 - 1),
    "model.name": MODEL,
    "site.backend": one_of("embedded", "prime-rl"),
    **{f"outer.{name}": rule for name, rule in _OUTER.items()},
    "orchestrator.batch_size": whole(1, 2**20),
    "orchestrator.group_size": whole(2, 2**16),
    "orchestrator.max_off_policy_steps": whole(0, 10**4),
    "orchestrator.renderer.name": one_of(*RENDERERS),
    "orchestrator.renderer.tool_parser": one_of("qwen3", "qwen3.5", "glm", "deepseek-v3"),
    "orchestrator.renderer.accept_template_difference": FLAG,
    "orchestrator.train.filter_zero_advantages": FLAG,
    "orchestrator.train.sampling.temperature": real(0, 2),
    "orchestrator.train.sampling.max_completion_tokens": whole(1, 2**22),
    "orchestrator.train.source[].name": PLAIN_NAME,
    f"{ENV_TASKSET}.id": PACKAGE,
    f"{AGENT}.harness.id": PACKAGE,
    f"{AGENT}.harness.tool_timeout": real(0, 3600),
    f"{AGENT}.max_turns": MANY,
    f"{AGENT}.max_total_tokens": COUNT,
    "trainer.optim.type": one_of("adamw", "muon"),
    "trainer.optim.mu": real(0, 1),
    "trainer.optim.lr": real(0, 10),
    "trainer.optim.weight_decay": real(0, 100),
    "trainer.optim.betas1": real(0, 1),
    "trainer.optim.betas2": real(0, 1),
    "trainer.optim.max_norm": real(0, 1e6),
    "trainer.scheduler.type": one_of("constant", "linear"),
    "trainer.scheduler.warmup_steps": whole(0, 10**9),
    "trainer.scheduler.decay_steps": whole(0, 10**9),
    "trainer.scheduler.min_lr": real(0, 10),
    **{f"trainer.loss.kwargs.{name}": rule for name, rule in _LOSS.items()},
    "ckpt.interval": COUNT,
}
EMBEDDED: Mapping[str, Rule] = {
    **_SHARED,
    f"{AGENT}.runtime.type": one_of("subprocess"),
    "orchestrator.algo.type": one_of("grpo"),
    "trainer.loss.type": one_of("custom"),
    "trainer.loss.import_path": one_of(*LOSSES),
    **{f"trainer.distill.{name}": rule for name, rule in _DISTILL.items()},
    "inference.engine": one_of("transformers", "vllm"),
    "inference.max_batch_size": whole(1, 2**16),
    "replay.teachers[].name": text(r"[a-z0-9][a-z0-9_-]{0,31}", "1 to 32 of a-z, 0-9, _ and -"),
    "replay.teachers[].base_url": TEACHER,
    "replay.teachers[].model": MODEL,
    "replay.teachers[].weight": real(0, 1e6),
    "replay.teachers[].timeout_s": real(0, 3600),
    "hints.teacher": one_of("frozen", "ema"),
    "hints.ema_decay": real(0, 1),
    "hints.allow_live": NO,
    "hints.base_url": TEACHER,
    "hints.model": MODEL,
    "hints.timeout_s": real(0, 3600),
    "hints.shuffle": FLAG,
    **{f"hints.templates.{kind}": TEMPLATE for kind in (*get_args(HintKind), *get_args(OutcomeKind))},
}
PRIME_RL: Mapping[str, Rule] = {
    **_SHARED,
    f"{AGENT}.runtime.type": one_of("subprocess", "prime"),
    f"{AGENT}.runtime.labels": Rule(
        "at most 8 names",
        lambda value: type(value) is list and len(value) <= 8 and all(map(PLAIN_NAME.admits, value)),
    ),
    "trainer.loss.type": one_of("custom"),
    "trainer.loss.import_path": one_of(*LOSS_PATHS),
    "trainer.loss.kwargs.inner": one_of(*INNER_LOSSES),
    "prime_rl.version": _choices(PrimeRlConfig, "version"),
    "deployment.type": one_of("single_node", "multi_node"),
    "deployment.num_train_gpus": whole(1, 4096),
    **{
        f"deployment.{name}": whole(0, 4096)
        for name in (
            "num_infer_gpus", "gpus_per_node", "num_train_nodes", "num_infer_nodes",
            "num_infer_replicas",
        )
    },
    "orchestrator.token_batch_size": COUNT,
    "orchestrator.concurrency.max_inflight": MANY,
    "trainer.dp_replicate": whole(1, 4096),
    "trainer.enable_router_replay": FLAG,
    "trainer.model.cp": whole(1, 4096),
    "trainer.model.ep": whole(1, 4096),
    "trainer.model.ac.freq": whole(1, 4096),
    "trainer.model.fused_lm_head_token_chunk_size": MANY,
    "trainer.model.optim_cpu_offload": FLAG,
    "trainer.model.fsdp_cpu_offload": FLAG,
    "trainer.model.lora.rank": whole(1, 4096),
    "trainer.model.lora.alpha": real(0, 1e6),
    "ckpt.keep_last": MANY,
    "rollout_transport.type": one_of("filesystem", "zmq"),
    "weight_broadcast.type": one_of("filesystem", "nccl"),
    "weight_broadcast.timeout": MANY,
    "inference.router": one_of("None"),
    "inference.vllm.max_model_len": whole(8, 2**22),
    "inference.vllm.gpu_memory_utilization": real(0, 1),
    "inference.vllm.tensor_parallel_size": whole(1, 4096),
    "inference.vllm.data_parallel_size": whole(1, 4096),
    "inference.vllm.enable_prefix_caching": FLAG,
    "inference.vllm.enable_return_routed_experts": FLAG,
    "inference.vllm.enforce_eager": FLAG,
    "inference.vllm.tool_call_parser": one_of("hermes", "qwen3_coder", "llama3_json", "openai", "deepseek_v3"),
}  # fmt: skip


def refusals(data: Mapping[str, Any]) -> Iterator[Refusal]:
    """Every setting of a recipe's data that no invitation may hold."""
    site = data.get("site")
    is_prime = isinstance(site, dict) and site.get("backend") == "prime-rl"
    yield from _refusals(data, "", PRIME_RL if is_prime else EMBEDDED)


def is_table(name: str, rules: Mapping[str, Rule]) -> bool:
    """Whether some allowed key lies in the table of that name; lists of tables end in []."""
    return any(key.startswith(f"{name}.") for key in rules)


def _refusals(data: Mapping[str, Any], place: str, rules: Mapping[str, Rule]) -> Iterator[Refusal]:
    """A key may have a rule and be a table, too: a weight is a number or a schedule."""
    for key, value in data.items():
        name = f"{place}.{key}" if place else key
        if not _KEY.fullmatch(key):
            yield Refusal(name, value)
        elif name in rules and not (isinstance(value, dict) and is_table(name, rules)):
            if not rules[name].admits(value):
                yield Refusal(name, value, rules[name].says)
        elif place == ENV_TASKSET:
            yield from _extra_refusals(name, key, value)
        elif is_table(name, rules):
            if isinstance(value, dict):
                yield from _refusals(value, name, rules)
            else:
                yield Refusal(name, value, "a table")
        elif is_table(f"{name}[]", rules):
            yield from _list_refusals(value, name, rules)
        else:
            yield Refusal(name, value)
    if place == ENV_TASKSET and len(data) > MOST_EXTRAS:
        yield Refusal(place, data, f"a table of at most {MOST_EXTRAS} settings")


def _list_refusals(value: Any, name: str, rules: Mapping[str, Rule]) -> Iterator[Refusal]:
    if not isinstance(value, list) or len(value) > MOST_ENTRIES:
        yield Refusal(name, value, f"a list of at most {MOST_ENTRIES} tables")
        return
    for entry in value:
        if isinstance(entry, dict):
            yield from _refusals(entry, f"{name}[]", rules)
        else:
            yield Refusal(name, entry, "a list of tables")


def _extra_refusals(name: str, key: str, value: Any) -> Iterator[Refusal]:
    """A taskset's own key goes to a package that the volunteer installed, which may do with it what it likes."""
    if not _EXTRA_KEY.fullmatch(key) or key in OWN_NAMES or f"_{key}".endswith(OWN_ENDINGS):
        yield Refusal(name, value)
    elif not EXTRA.admits(value):
        yield Refusal(name, value, EXTRA.says)


def shown_name(name: str) -> str:
    """A key's name as people may see it: its lists unmarked, nothing that moves a cursor, not long."""
    return name.replace("[]", "") if len(name) <= 120 and re.fullmatch(r"[\w.\[\]-]+", name, re.A) else shown(name)


def shown(value: Any) -> str:
    """A value as people may see it: in ASCII, on one line, cut to 60 characters."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if type(value) is int and abs(value) > 10**30:
        return "a huge number"  # Python refuses to spell some
    spelled = ascii(value if type(value) is not str else value[:60])
    return spelled if len(spelled) <= 60 else f"{spelled[:57]}..."
