"""Any loss inside PRIME-RL's trainer, as a site: `import_path = "composer_prime.sites.prime_rl.outer.loss"`.

Importing this inside the trainer makes it a site of the outer run that the environment, `[trainer.env_vars]` or the
loss's own settings name, and adds the term of `[trainer.distill]` where the environment says one. Where nothing is
named nothing is touched, and the loss is the inner one, bit for bit.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

from composer_prime.errors import ConfigError
from composer_prime.losses.records import LossInputs, LossOutputs
from composer_prime.sites.prime_rl import versions
from composer_prime.sites.prime_rl.outer.inner import InnerLoss
from composer_prime.sites.prime_rl.outer.steps import Step, Trainer, on_step
from composer_prime.sites.prime_rl.saying import ending_in_one_line, naming_what_is_missing, rank, show_our_log
from composer_prime.sites.prime_rl.settings import OUTER, HookSettings, distill_settings

__all__ = ["Step", "loss", "on_step"]

logger = logging.getLogger(__name__)

_OURS = "composer_prime.sites.prime_rl."
_NO_TRAINER = (
    "and no PRIME-RL's trainer makes its loss here, by setup_rl_loss_fn in prime_rl.trainer.rl.loss: set it for the "
    f"trainer alone, under [trainer.env_vars]; or {versions.remedy()}"
)


class _Call(NamedTuple):
    """The newest call: its settings, their loss, and whether a trainer made it."""

    kwargs: dict[str, Any]
    inner: InnerLoss
    in_trainer: bool


_newest: _Call | None = None


def loss(inputs: LossInputs, **kwargs: Any) -> LossOutputs:
    """One packed sequence's loss, by the loss that `inner` names.

    inner         composer_loss (the default), one of the installed PRIME-RL's own by its name, such as "ipo", or a
                  function by its path, such as "my_package.my_loss". Value and gradient are its own
    replay_tau    weight of the replay term (`losses.composer.replay_loss`), added where this is above 0
    replay_clip   nats; its bound
    outer, site   the outer run and this site's name, where neither environment nor `[trainer.env_vars]` say them
    all others    are the inner loss's

    Raises ConfigError for an inner loss that can't be had, doesn't take these settings or these inputs, or returns
    another record; PRIME-RL's trainer ends with that line.
    """
    global _newest
    if _newest is None or _newest.kwargs != kwargs:
        frame = versions.running_trainer()
        with _one_line(frame is not None):
            if frame is None:
                _refuse_outside({}, kwargs)
            else:
                _check_joined(frame, kwargs)
            _newest = _Call(kwargs, InnerLoss.find(kwargs), frame is not None)
    with _one_line(_newest.in_trainer):
        return _newest.inner(inputs)


def _one_line(in_trainer: bool) -> AbstractContextManager[None]:
    """How an error is told: inside a trainer in one line that ends it, elsewhere by raising it."""
    return ending_in_one_line(every_rank=True) if in_trainer else nullcontext()


def _refuse_outside(environ: Mapping[str, str], kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError where a run is named and no trainer that we can find is calling us."""
    with _one_line(versions.is_loaded()):
        settings = HookSettings.read(environ, kwargs=kwargs)
        if settings is not None:
            raise ConfigError(f"the outer run {settings.uri} is named, {_NO_TRAINER}")


def _say_alone() -> None:
    show_our_log()
    if rank() == 0:
        logger.info("no_outer_run: this trainer trains alone; %s or trainer.loss.kwargs.outer names a run", OUTER)


def _check_joined(frame: FrameType, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError where the trainer comes to its first loss alone, and an outer run is named."""
    trainer = Trainer.found(frame)
    if trainer is not None:
        trainer.check_first_batch()
    settings = HookSettings.read(os.environ, _env_vars(frame), kwargs)
    if settings is not None and (trainer is None or not trainer.joined):
        raise ConfigError(
            f"this trainer is to take part in the outer run {settings.uri} and hasn't joined it before its first step: "
            f"let trainer.loss.import_path name {_OURS}outer.loss, and nothing import that before PRIME-RL does"
        )


def _env_vars(frame: FrameType) -> Mapping[str, str]:
    return getattr(versions.config_of(frame), "env_vars", None) or {}


def _our_settings(frame: FrameType) -> Mapping[str, Any]:
    """The loss's own settings; none where the loss is another's, whose module imports us."""
    table: Any = getattr(versions.config_of(frame), "loss", None)
    return table.kwargs if str(getattr(table, "import_path", "")).startswith(_OURS) else {}


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Make the trainer that is importing us a site of the run that is named; say so in its log where none is.

    Ends the trainer with one line and exit code 2 when it can't be one, or when its loss can't be had. Raises
    ConfigError outside a trainer.
    """
    frame = versions.running_trainer()
    if frame is None:
        _refuse_outside(environ, {})
        if versions.is_loaded():
            _say_alone()
        return
    with ending_in_one_line():
        kwargs = _our_settings(frame)
        settings = HookSettings.read(environ, _env_vars(frame), kwargs)
        if settings is None:
            _say_alone()
        else:
            with naming_what_is_missing():
                from composer_prime.sites.prime_rl.hook import make_site

            make_site(settings, frame)
        distill = distill_settings(environ, _env_vars(frame))
        if distill is not None:
            from composer_prime.sites.prime_rl import topk

            topk.install(distill, frame)
        if kwargs:
            InnerLoss.find(kwargs)


install()
