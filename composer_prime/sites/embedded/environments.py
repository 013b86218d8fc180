"""The environments a site trains on: verifiers packages, imported, configured for this site and cut to its shard.

Environments are other people's code: whatever goes wrong in them at this point becomes one EnvError with its cause.
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import logging
import random
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.utils.loaders import harness_class, taskset_class

from composer_prime.config.recipe import SourceConfig, module_of
from composer_prime.config.settings import SiteSettings
from composer_prime.config.teachers import HintKind
from composer_prime.errors import EnvError
from composer_prime.sites.embedded import chat
from composer_prime.sites.embedded.installed import check_installed
from composer_prime.sites.embedded.result import write_whole
from composer_prime.sites.embedded.tools.stage import SourceTools, keep_toolsets
from composer_prime.teachers.gate import Gate

MAX_ENDLESS_TASKS = 10_000
"""Tasks that are taken, before sharding, from a taskset that never ends."""

STAMPING_ID = "composer-prime"
"""The id of sites/prime_rl/stamping_env.py: our package's name, where verifiers looks for it."""

_ROLLOUTS_PER_SERVER = 8
"""Rollouts that share one of verifiers' interception servers. Each server has a connection pool of its own, whose
bookkeeping grows with the square of its connections: 8 take 2 ms less per rollout than verifiers' default of 32."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """One environment of the recipe with this site's share of its tasks, at least one."""

    name: str
    env: vf.Env
    tasks: list[vf.Task]
    tools: SourceTools | None
    """What its toolsets are played with; None where another harness than "chat" plays it."""


def load_sources(settings: SiteSettings) -> list[Source]:
    """All environments of the recipe, in its order. Raises EnvError with the real cause."""
    chat.register()
    return [load_source(source, settings) for source in settings.recipe.orchestrator.train.source]


def load_source(source: SourceConfig, settings: SiteSettings) -> Source:
    """One environment, and the tasks of this site's shard.

    A taskset with the settings `num_shards` and `shard` cuts its own shard; of any other, this site takes every
    num_shards-th task. `seed`, where a taskset has it, is the run's unless the recipe says otherwise; what it draws
    from `random` while it makes its tasks is the run's too, so that all sites, at every start, have the same tasks.
    Raises EnvError when it can't be imported, refuses its settings, or has no task for us.
    """
    taskset_id = source.env.taskset.id
    import_taskset(taskset_id)
    try:
        with _seeded(f"{settings.recipe.run.seed}/{source.name}"):
            env, cuts_itself = _resolve(source, settings)
            endless = getattr(env.taskset, "INFINITE", False)
            tasks = list(itertools.islice(env.taskset, MAX_ENDLESS_TASKS if endless else None))
    except ValidationError as error:
        raise EnvError(f"environment {taskset_id!r} refuses its settings: {_first_mistake(error)}") from error
    except Exception as error:  # the environment's own code: no kind of error is out of the question
        raise EnvError(f"environment {taskset_id!r} can't be set up: {_describe(error)}") from error
    _check_harness(source, taskset_id)
    _check_error_kinds(env.taskset, taskset_id)
    ours = tasks if cuts_itself else tasks[settings.data_shard :: settings.num_shards]
    if not ours:
        raise EnvError(
            f"environment {taskset_id!r} has {len(tasks)} tasks, none for shard {settings.data_shard} of "
            f"{settings.num_shards}: give it more tasks, or run fewer sites"
        )
    logger.info("source=%s taskset=%s tasks=%d shard=%d", source.name, taskset_id, len(ours), settings.data_shard)
    tools = keep_toolsets(env, ours) if source.env.agent.harness.id == chat.HARNESS_ID else None
    return Source(source.name, env, ours, tools)


@contextlib.contextmanager
def _seeded(seed: str) -> Iterator[None]:
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def _check_harness(source: SourceConfig, taskset_id: str) -> None:
    """A rollout runs in a process here, and never in a container."""
    name = source.env.agent.harness.id
    needy = [f"harness {name}"] if harness_class(name).NEEDS_CONTAINER else []
    needy += ["its task"] if taskset_class(taskset_id).task_type().NEEDS_CONTAINER else []
    if needy:
        raise EnvError(
            f"environment {taskset_id!r}: {needy[0]} needs a container, and rollouts of an embedded site run in "
            'processes of this machine: use harness.id "chat" and tasks without one, or a PRIME-RL site'
        )


def _check_error_kinds(taskset: vf.Taskset, taskset_id: str) -> None:
    """A taskset may list, as ERROR_KINDS, the `error_kind`s that its tools' answers name."""
    kinds = getattr(taskset, "ERROR_KINDS", ())
    unknown = [kind for kind in kinds if kind not in get_args(HintKind)]
    if unknown:
        raise EnvError(
            f"environment {taskset_id!r} names error_kind {str(unknown[0])[:60]!r} in ERROR_KINDS, which is none of "
            f"{', '.join(get_args(HintKind))}: use one of those"
        )


def import_taskset(taskset_id: str) -> None:
    """Import an environment's package as verifiers would, so that its own error is what is seen.

    verifiers takes every ModuleNotFoundError, also one from inside the package, for "not installed".
    Raises EnvError.
    """
    check_installed(taskset_id)
    module = module_of(taskset_id)
    bundled = f"verifiers.v1.tasksets.{module}"
    try:
        importlib.import_module(bundled if importlib.util.find_spec(bundled) else module)
    except Exception as error:  # an import runs whatever the package's author wrote
        raise EnvError(
            f"environment {taskset_id!r} can't be imported: {_describe(error)}: repair it, or install what it needs"
        ) from error


def _resolve(source: SourceConfig, settings: SiteSettings) -> tuple[vf.Env, bool]:
    """The environment, and whether its taskset cuts its own shard."""
    data: dict[str, Any] = {
        "taskset": source.env.taskset.model_dump(),
        "agent": source.env.agent.model_dump(),
        "interception": {"type": "elastic", "multiplex": _ROLLOUTS_PER_SERVER},
    }
    if settings.recipe.has_streams:
        data |= stamping(settings)
    known = type(vf.resolve_env_config(data).taskset).model_fields.keys()
    ours: dict[str, Any] = {"seed": settings.recipe.run.seed}
    cuts_itself = {"num_shards", "shard"} <= known
    if cuts_itself:
        ours |= {"num_shards": settings.num_shards, "shard": settings.data_shard}
    data["taskset"] = {name: value for name, value in ours.items() if name in known} | data["taskset"]
    return vf.load_environment(vf.resolve_env_config(data)), cuts_itself


def gates_of(sources: Iterable[Source]) -> dict[str, Gate]:
    """The gates of a site's teachers, by source and teacher."""
    return {
        f"{source.name}/{name}": gate
        for source in sources
        for name, gate in getattr(source.env, "gates", {}).items()  # the environment that stamps has some
    }


def load_gates(gates: dict[str, Gate], file: Path) -> None:
    """Let the gates go on from what `save_gates` wrote, where there is something."""
    if file.exists():
        for name, state in json.loads(file.read_text(encoding="utf-8")).items():
            if name in gates:
                gates[name].load_state_dict(state)


def save_gates(gates: dict[str, Gate], file: Path) -> None:
    """Write what `load_gates` reads, where there are gates."""
    if gates:
        write_whole(file, json.dumps({name: gate.state_dict() for name, gate in gates.items()}) + "\n")


def stamping(settings: SiteSettings) -> dict[str, Any]:
    """The settings of the environment that stamps teachers' numbers, as the recipe's `[replay]` and `[hints]` say."""
    hints, orchestrator = settings.recipe.hints, settings.recipe.orchestrator
    batch = orchestrator.batch_size // len(orchestrator.train.source)
    return {
        "id": STAMPING_ID,
        "tokenizer": str(settings.model_dir),
        "teachers": [teacher.model_dump() for teacher in settings.recipe.replay.teachers],
        "top_k": settings.recipe.trainer.distill.top_k,
        "hints": None if hints is None else hints.model_dump(),
        "rollouts": settings.recipe.max_steps * batch,
        "batch": batch,
        "embedded": True,
    }


def _describe(error: Exception) -> str:
    """The error's kind and message, on one line, and where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _first_mistake(error: ValidationError) -> str:
    mistake = error.errors()[0]
    name = ".".join(["env", *(str(part) for part in mistake["loc"])])
    return f"{name}: {mistake['msg'].removeprefix('Value error, ')}"
