"""The loss inside ours: composer_loss, one of PRIME-RL's own by its name, or anybody's by its path; and its replay.

PRIME-RL's own are made by its own `setup_rl_loss_fn` from its own configuration, so that they are what they are without
us, in every version: functions up to 559b447, objects later.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from composer_prime.errors import ConfigError
from composer_prime.losses.composer import composer_loss, replay_loss
from composer_prime.losses.records import LossInputs, LossOutputs, outputs_record
from composer_prime.sites.prime_rl import versions
from composer_prime.sites.prime_rl.settings import KWARGS

LossFn = Callable[[LossInputs], LossOutputs]

COMPOSER = "composer_loss"
_REPLAY = ("replay_tau", "replay_clip")
_PLACE = "trainer.loss.kwargs.inner"


@dataclass(frozen=True)
class InnerLoss:
    """A loss with its settings, as it is called.

    name     as `inner` has it
    loss     what it names
    replay   settings of the replay term that is added; None: nothing is
    """

    name: str
    loss: LossFn
    replay: Mapping[str, float] | None = None

    @classmethod
    def find(cls, kwargs: Mapping[str, Any]) -> "InnerLoss":
        """The loss that these settings name. Raises ConfigError, with the real cause, when it can't be had."""
        settings = {name: value for name, value in kwargs.items() if name not in ("inner", *KWARGS.values())}
        name = kwargs.get("inner", COMPOSER)
        if not isinstance(name, str):
            raise ConfigError(f"{_PLACE} ({name!r}) must be text: a loss's name or path")
        if name == COMPOSER:
            _try(composer_loss, settings)
            return cls(name, lambda inputs: composer_loss(inputs, **settings))
        replay = {key: settings.pop(key) for key in _REPLAY if key in settings}
        if replay.get("replay_tau"):
            _check_replay(replay)
        loss = _imported(name, settings) if "." in name else _built_in(name, settings)
        return cls(name, loss, replay if replay.get("replay_tau") else None)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """As `losses.composer.composer_loss`. Raises ConfigError for an inner loss that doesn't keep to the records."""
        try:
            outputs = self.loss(inputs)
        except AttributeError as error:
            if error.obj is not inputs:
                raise
            raise ConfigError(
                f"{_PLACE} ({self.name}) reads {error.name} of its inputs, and here they have "
                f"{', '.join(vars(inputs))}: use another loss, or the PRIME-RL that it was written for"
            ) from error
        value, metrics = getattr(outputs, "loss", None), getattr(outputs, "metrics", None)
        if not isinstance(value, torch.Tensor) or value.ndim != 0 or not isinstance(metrics, dict):
            raise ConfigError(
                f"{_PLACE} ({self.name}) returned {type(outputs).__name__}: it must return PRIME-RL's LossOutputs, the "
                "0-dim sum over tokens as loss and a dictionary as metrics"
            )
        if self.replay is None:
            return outputs
        replay = replay_loss(inputs, **self.replay)
        return outputs_record()(loss=value + replay.loss, metrics=metrics | replay.metrics)


def _try(loss: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that one of our losses doesn't take."""
    try:
        loss(LossInputs(**{name: torch.zeros(0) for name in versions.INPUTS}), **settings)
    except TypeError as error:
        raise ConfigError(f"trainer.loss.kwargs ({dict(settings)}) must be numbers: {error}") from error


def _check_replay(replay: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that the replay term doesn't take, or where no teacher's number can come."""
    _try(replay_loss, replay)
    given = versions.record_fields("LossInputs")
    if given and not {"ref_logprobs", "teacher_logprobs"} & {*given}:
        raise ConfigError(
            f"trainer.loss.kwargs.replay_tau ({replay['replay_tau']}) needs teachers' numbers, and this PRIME-RL's "
            f"losses are given {', '.join(given)} alone: drop it, or use a PRIME-RL with ref_logprobs"
        )


def _built_in(name: str, settings: Mapping[str, Any]) -> LossFn:
    """One of upstream's own, as its trainer would make it. Raises ConfigError where this version hasn't got it."""
    upstream = sys.modules.get(versions.LOSS_MODULE)
    setup, union = getattr(upstream, "setup_rl_loss_fn", None), getattr(upstream, "LossConfig", None)
    if setup is None or union is None:
        where = "this process isn't PRIME-RL's trainer" if upstream is None else "this PRIME-RL has no setup_rl_loss_fn"
        raise ConfigError(
            f"{_PLACE} ({name}) names one of PRIME-RL's own losses, and {where}: name a function by its path, or "
            f"{COMPOSER}"
        )
    records = {record.model_fields["type"].default: record for record in _members(union)}
    records.pop("custom", None)
    if name not in records:
        raise ConfigError(
            f"{_PLACE} ({name}) must be {COMPOSER}, a function's path, or one of this PRIME-RL's losses: "
            f"{', '.join(sorted(records))}"
        )
    from pydantic import ValidationError

    try:
        made = setup(records[name](**settings))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the settings"
        raise ConfigError(
            f"trainer.loss.kwargs.{place} doesn't fit PRIME-RL's {name} loss ({first['msg']}): it takes "
            f"{', '.join(key for key in records[name].model_fields if key != 'type') or 'none'}"
        ) from error
    return getattr(made, "loss", made)


def _members(union: Any) -> tuple[Any, ...]:
    """The records of `Annotated[A | B, ...]`."""
    return get_args(get_args(union)[0])


def _imported(path: str, settings: Mapping[str, Any]) -> LossFn:
    """A function by its path. Raises ConfigError with what its import raised, or when it doesn't take the settings."""
    module, _, name = path.rpartition(".")
    if module.startswith("composer_prime.sites.prime_rl"):
        raise ConfigError(f"{_PLACE} ({path}) can't be the loss that wraps it: name another, or {COMPOSER}")
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever somebody's module raises is the cause
        raise ConfigError(f"{_PLACE} ({path}) can't be imported: {type(error).__name__}: {error}") from error
    if not hasattr(function, "__call__"):  # noqa: B004  `callable` would make an object of what it returns
        raise ConfigError(f"{_PLACE} ({path}) is a {type(function).__name__}: name a function of inputs and settings")
    signature = inspect.signature(function)
    try:
        signature.bind(None, **settings)
    except TypeError as error:
        raise ConfigError(f"trainer.loss.kwargs don't fit {path}{signature}: {error}") from error

    def loss(inputs: LossInputs) -> LossOutputs:
        return function(inputs, **settings)

    return loss
