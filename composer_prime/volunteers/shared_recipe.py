"""The recipe as it travels in an invitation: what all sites share, and nothing that is one machine's own affair.

Every key that it may hold stands here by name, with its kind and its range: fields that the schema marks as shared, and
tables that the schema doesn't know. Numbers, flags and names from closed lists choose nothing that runs and reach no
file; for the names of code the volunteer's word is asked. What is a machine's own is left out when an invitation is
written; all else is refused, when one is written and when one is read.
"""

import math
import re
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from composer_prime.config.load import any_from_data
from composer_prime.config.messages import kinds_in, table_in
from composer_prime.config.prime_rl import LOSS_PATHS, PORTS, PrimeRecipe
from composer_prime.config.recipe import TINY_MODELS, Recipe, RecipeBase
from composer_prime.config.table import RUN_NAME, SHARED
from composer_prime.config.teachers import HINT_FIELDS, HintKind, OutcomeKind
from composer_prime.config.toml import read_toml, to_toml
from composer_prime.errors import ConfigError, InvitationRefused
from composer_prime.volunteers.invitation import is_public_url

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
LOCAL_KEYS = (
    "output_dir", "clean", "sites", "launch", "site.name", "site.key_file", "site.same_name",
    "site.device", "site.threads", "site.micro_batch_tokens", "site.max_mbit_up", "site.max_mbit_down",
    "inference.python", "inference.server", "prime_rl.command", "prime_rl.first_port", "env_vars", "slurm", "log",
    "monitors", "outer.store", "outer.owner", "hints.api_key_var",
    *(name for name in PORTS if name.endswith("port")),
)  # fmt: skip
"""Settings that are each machine's own."""
UPSTREAM_TABLES = ("model", "trainer", "orchestrator", "inference", "ckpt", "tokenizer", "weight_broadcast",
                   "rollout_transport", "deployment")  # fmt: skip
"""PRIME-RL's tables that an invitation may hold settings of."""
MACHINE_ENDINGS = ("_dir", "_path", "command", "env_vars", "trust_remote_code")
"""PRIME-RL's keys that end so name files and programs of a machine, set its variables, or run a model's own code."""
TASKSET_ENDINGS = (
    "_dir", "_path", "_file", "_folder", "_command", "_url", "_host", "_port", "_var", "_vars", "_env", "_code",
    "_key", "_token", "_secret", "_password", "_passwd", "_credential", "_credentials",
)  # fmt: skip
"""A taskset's keys that end so (or are called so) would name what is the volunteer's: a file, an address, a secret."""
TASKSET_NAMES = ("task", "system_prompt")
"""verifiers' own, which every taskset has: a table of settings for its tasks, and a file."""
TRUST = "trust_remote_code"
TASKSET, AGENT = "orchestrator.train.source[].env.taskset", "orchestrator.train.source[].env.agent"
MOST_CHARACTERS, MOST_ENTRIES, MOST_EXTRAS = 2**16, 32, 32
"""Of a recipe, of a list of tables, and of a taskset's own keys."""
MOST_WHOLE, MOST_REAL = 10**9, 1e6
"""Of numbers that the schema doesn't bound closer."""

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
        name = self.name.replace("[]", "")  # nothing in it may move a cursor
        name = name if len(name) <= 120 and re.fullmatch(r"[\w.-]+", name, re.A) else shown(self.name)
        return f"{name} to {shown(self.value)}, which {limit}"


def shown(value: Any) -> str:
    """A value as people may see it: in ASCII, on one line, cut to 60 characters."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if type(value) is int and abs(value) > 10**30:
        return "a huge number"  # Python refuses to spell some
    spelled = ascii(value if type(value) is not str else value[:60])
    return spelled if len(spelled) <= 60 else f"{spelled[:57]}..."


# --- rules -----------------------------------------------------------------------------------------------------------


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
        fields = [part[1:] for part in string.Formatter().parse(value) if part[1] is not None]
    except ValueError:
        return False
    return all(field in HINT_FIELDS and not spec and conversion is None for field, spec, conversion in fields)


def _is_plain(value: Any) -> bool:
    """A number, a flag, or a short text that spells no path, URL or address: at most a hub id's one slash."""
    if type(value) is str:
        return (_PLAIN.fullmatch(value) is not None or _MODEL.fullmatch(value) is not None) and ".." not in value
    return type(value) is bool or real(-1e12, 1e12).admits(value)


FLAG = Rule("true or false", lambda value: type(value) is bool)
MODEL = Rule(f"a model of the Hugging Face hub, org/name, or one of {', '.join(TINY_MODELS)}, and no folder", _is_model)
PACKAGE = Rule("a package's plain name (a to z, 0 to 9, - and _) that Python doesn't have itself", _is_package)
EXTRA = Rule("a number, true or false, or at most 200 letters, digits and _.,+=-, and no path or address", _is_plain)
TEACHER = Rule(
    "https://host or http://host of a public server, without a user or query",
    lambda value: type(value) is str and is_public_url(value),
)
TEMPLATE = Rule("at most 4,000 characters with {error} and {tool} alone in braces", _is_template)
PLAIN_NAME = text(r"[A-Za-z0-9][A-Za-z0-9_. -]{0,63}", "1 to 64 letters, digits, spaces and _.-")
LABELS = Rule(
    "at most 8 names", lambda value: type(value) is list and len(value) <= 8 and all(map(PLAIN_NAME.admits, value))
)

_NARROWER: Mapping[str, Rule] = {
    "run.name": text(RUN_NAME, "a run's name"),
    "model.name": MODEL,
    "orchestrator.renderer.name": one_of(*RENDERERS),
    "orchestrator.renderer.tool_parser": one_of("qwen3", "qwen3.5", "glm", "deepseek-v3"),
    "orchestrator.train.source[].name": PLAIN_NAME,
    f"{TASKSET}.id": PACKAGE,
    f"{AGENT}.harness.id": PACKAGE,
    "trainer.loss.import_path": one_of(*LOSSES),
    "replay.teachers[].name": text(r"[a-z0-9][a-z0-9_-]{0,31}", "1 to 32 of a-z, 0-9, _ and -"),
    **{f"{table}.base_url": TEACHER for table in ("replay.teachers[]", "hints")},
    **{f"{table}.model": MODEL for table in ("replay.teachers[]", "hints")},
    **{f"trainer.distill.{name}_tau": real(0, 1000) for name in ("hint", "replay")},
    "hints.teacher": one_of("frozen", "ema"),
    "hints.allow_live": Rule("false", lambda value: value is False),
}
"""Of marked fields, those that an invitation holds within narrower bounds than the schema's: every text among them."""


def _marked(model: type[BaseModel], place: str = "") -> Iterator[tuple[str, Rule]]:
    """(dotted name, rule) of every field that the schema marks as shared; lists of tables end in []."""
    for name, field in model.model_fields.items():
        key = f"{place}{name}"
        kinds = list(kinds_in(field.annotation))
        if field.json_schema_extra == SHARED and kinds:
            yield key, _NARROWER.get(key) or _rule_of(key, kinds, field)
        if field.json_schema_extra == SHARED and (table := table_in(field.annotation)) is not None:
            yield from _marked(table, f"{key}[]." if get_origin(field.annotation) is tuple else f"{key}.")


def _rule_of(key: str, kinds: list[Any], field: FieldInfo) -> Rule:
    """The schema's own bounds."""
    limits = {
        name: getattr(each, name) for each in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(each, name)
    }
    low, high = limits.get("ge", limits.get("gt", 0)), limits.get("le", limits.get("lt"))
    if bool in kinds:
        return FLAG
    if int in kinds:
        return whole(low, MOST_WHOLE if high is None else high - ("lt" in limits))
    if float in kinds:
        return real(low, MOST_REAL if high is None else high)
    if not all(isinstance(kind, str) for kind in kinds):
        raise TypeError(f"{key} is marked as shared, and nothing says which texts an invitation may hold there")
    return one_of(*kinds)


_LOSS_TAUS = ("dppo_mask_low", "dppo_mask_high", "adv_tau", "kl_tau", "replay_tau", "replay_clip", "ref_kl_tau",
              "ipo_threshold", "ratio_low", "ratio_high")  # fmt: skip
"""Of composer_loss's keyword arguments, which the schema leaves to the function."""
EMBEDDED: Mapping[str, Rule] = {
    **dict(_marked(Recipe)),
    **dict.fromkeys((f"trainer.loss.kwargs.{name}" for name in _LOSS_TAUS), real(0, 1000)),
    "trainer.loss.kwargs.ratio_cap": real(1, MOST_REAL),
    "trainer.loss.kwargs.trust_region": one_of("dppo", "ipo", "icepop", "cispo"),
    "trainer.loss.kwargs.score_centering": FLAG,
    **{f"hints.templates.{kind}": TEMPLATE for kind in (*get_args(HintKind), *get_args(OutcomeKind))},
}
_EMBEDDED_ONLY = ("orchestrator.algo.", "trainer.distill.", "inference.", "replay.", "hints.")
PRIME_RL: Mapping[str, Rule] = {
    **{name: rule for name, rule in EMBEDDED.items() if not name.startswith(_EMBEDDED_ONLY)},
    **dict(_marked(PrimeRecipe)),
    f"{AGENT}.runtime.type": one_of("subprocess", "prime"),
    f"{AGENT}.runtime.labels": LABELS,
    "trainer.loss.import_path": one_of(*LOSS_PATHS),
    "trainer.loss.kwargs.inner": one_of(*INNER_LOSSES),
    "deployment.type": one_of("single_node", "multi_node"),
    **{f"deployment.{name}": whole(0, 4096) for name in (
        "num_train_gpus", "num_infer_gpus", "gpus_per_node", "num_train_nodes", "num_infer_nodes", "num_infer_replicas"
    )},
    **dict.fromkeys(("orchestrator.token_batch_size", "orchestrator.concurrency.max_inflight", "ckpt.keep_last",
                     "trainer.model.fused_lm_head_token_chunk_size", "weight_broadcast.timeout",
                     "inference.vllm.max_model_len"), whole(1, MOST_WHOLE)),
    **dict.fromkeys(("trainer.dp_replicate", "trainer.model.cp", "trainer.model.ep", "trainer.model.ac.freq",
                     "trainer.model.lora.rank", "inference.vllm.tensor_parallel_size",
                     "inference.vllm.data_parallel_size"), whole(1, 4096)),
    **dict.fromkeys(("trainer.enable_router_replay", "trainer.model.optim_cpu_offload",
                     "trainer.model.fsdp_cpu_offload", "inference.vllm.enable_prefix_caching",
                     "inference.vllm.enable_return_routed_experts", "inference.vllm.enforce_eager"), FLAG),
    "trainer.model.lora.alpha": real(0, MOST_REAL),
    "rollout_transport.type": one_of("filesystem", "zmq"),
    "weight_broadcast.type": one_of("filesystem", "nccl"),
    "inference.router": one_of("None"),
    "inference.vllm.gpu_memory_utilization": real(0, 1),
    "inference.vllm.tool_call_parser": one_of("hermes", "qwen3_coder", "llama3_json", "openai", "deepseek_v3"),
}  # fmt: skip
"""PRIME-RL's own tables, of which the schema knows nothing, beside the keys that embedded sites have too."""


# --- writing and reading ---------------------------------------------------------------------------------------------


def shared_toml(recipe: RecipeBase) -> str:
    """The recipe as an invitation holds it. Raises ConfigError where a setting can't just be left out."""
    data = recipe.to_data()
    rules = PRIME_RL if isinstance(recipe, PrimeRecipe) else EMBEDDED
    for name in LOCAL_KEYS:
        _drop(data, name.split("."))
    for teacher in data.get("replay", {}).get("teachers", ()):
        teacher.pop("api_key_var", None)
    for name in UPSTREAM_TABLES if isinstance(recipe, PrimeRecipe) else ():
        _drop_machines_own(data.get(name))
    _drop_empty(data, "", rules)
    for refused in refusals(data):
        raise ConfigError(f"the recipe sets {refused}: give a recipe that does without (--recipe)")
    any_from_data(data)  # it must still be one
    text = to_toml(data)
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"the recipe has {len(text)} characters, an invitation's at most {MOST_CHARACTERS}: cut it")
    return text


def read_shared(text: str) -> RecipeBase:
    """The recipe in an invitation. Raises InvitationRefused where it sets what no invitation may, else ConfigError."""
    if len(text) > MOST_CHARACTERS:
        raise InvitationRefused(
            f"the invitation's recipe has {len(text)} characters, of {MOST_CHARACTERS} at most: ask for another one"
        )
    try:
        data = read_toml(text)
    except ValueError as error:
        raise ConfigError(f"the invitation's recipe isn't TOML ({shown(str(error))}): ask for another one") from None
    for refused in refusals(data):
        raise InvitationRefused(
            f"the invitation's recipe sets {refused}: ask the run's owner for an invitation that this version's "
            "`composer-prime invite` wrote"
        )
    return any_from_data(data)


def _drop(data: Any, path: list[str]) -> None:
    for part in path[:-1]:
        data = data.get(part) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data.pop(path[-1], None)


def _drop_machines_own(table: Any) -> None:
    """Take out what PRIME-RL's keys say of a machine; in lists of tables, as environments are, it is refused."""
    if not isinstance(table, dict):
        return
    for key, value in list(table.items()):
        if key.endswith(MACHINE_ENDINGS) and (key != TRUST or value is False):
            del table[key]
        else:
            _drop_machines_own(value)


def _drop_empty(data: dict[str, Any], place: str, rules: Mapping[str, Rule]) -> None:
    """Take out tables of which nothing is left, unless their being there says something."""
    for key, value in list(data.items()):
        if isinstance(value, dict):
            _drop_empty(value, f"{place}{key}.", rules)
            if not value and not _is_table(f"{place}{key}", rules):
                del data[key]


def refusals(data: Mapping[str, Any]) -> Iterator[Refusal]:
    """Every setting of a recipe's data that no invitation may hold."""
    site = data.get("site")
    is_prime = isinstance(site, dict) and site.get("backend") == "prime-rl"
    yield from _refusals(data, "", PRIME_RL if is_prime else EMBEDDED)


def _is_table(name: str, rules: Mapping[str, Rule]) -> bool:
    """Whether some allowed key lies in the table of that name; lists of tables end in []."""
    return any(key.startswith(f"{name}.") for key in rules)


def _refusals(data: Mapping[str, Any], place: str, rules: Mapping[str, Rule]) -> Iterator[Refusal]:
    """A key may have a rule and be a table, too: a weight is a number or a schedule."""
    for key, value in data.items():
        name = f"{place}.{key}" if place else key
        if not _KEY.fullmatch(key):
            yield Refusal(name, value)
        elif name in rules and not (isinstance(value, dict) and _is_table(name, rules)):
            if not rules[name].admits(value):
                yield Refusal(name, value, rules[name].says)
        elif place == TASKSET:  # a key of its own: the package, which the volunteer installed, may do what it likes
            if not _EXTRA_KEY.fullmatch(key) or key in TASKSET_NAMES or f"_{key}".endswith(TASKSET_ENDINGS):
                yield Refusal(name, value)
            elif not EXTRA.admits(value):
                yield Refusal(name, value, EXTRA.says)
        elif _is_table(name, rules):
            yield from _refusals(value, name, rules) if isinstance(value, dict) else (Refusal(name, value, "a table"),)
        elif not _is_table(f"{name}[]", rules):
            yield Refusal(name, value)
        elif not isinstance(value, list) or len(value) > MOST_ENTRIES:
            yield Refusal(name, value, f"a list of at most {MOST_ENTRIES} tables")
        else:
            for entry in value:
                is_dict = isinstance(entry, dict)
                yield from (
                    _refusals(entry, f"{name}[]", rules) if is_dict else (Refusal(name, entry, "a list of tables"),)
                )
    if place == TASKSET and len(data) > MOST_EXTRAS:
        yield Refusal(place, data, f"a table of at most {MOST_EXTRAS} settings")
