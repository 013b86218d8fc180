"""Which outer run a trainer belongs to, as its environment, its configuration or its loss's own settings say it.

Only upstream's launchers put `[trainer.env_vars]` into the environment: under torchrun or in a pod they are read here.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from composer_prime.errors import ConfigError

if TYPE_CHECKING:
    from composer_prime.config.distill import DistillConfig

OUTER, SITE, KEY, SAME_NAME, MBIT_UP, MBIT_DOWN = NAMES = tuple(
    f"COMPOSER_PRIME_{name}" for name in ("OUTER", "SITE", "KEY", "SAME_NAME", "MAX_MBIT_UP", "MAX_MBIT_DOWN")
)
DISTILL = "COMPOSER_PRIME_DISTILL"
"""The recipe's [trainer.distill] as JSON, with an outer run or without; it is unset where no distributions are used."""
KWARGS = {OUTER: "outer", SITE: "site"}
"""What the loss's own settings may say as well, and by which name."""


@dataclass(frozen=True)
class HookSettings:
    """What a trainer is told.

    uri       the run's root in its bucket
    site      the site's name
    key_file  the site's private key, in a run that admits keys
    replace   whether the site takes its name over from a process that is still alive; otherwise it is refused
    mbit_up, mbit_down   that it moves to and from the bucket at most, on average; None: what the link gives
    """

    uri: str
    site: str
    key_file: Path | None
    replace: bool = True
    mbit_up: float | None = None
    mbit_down: float | None = None

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str],
        env_vars: Mapping[str, str] = MappingProxyType({}),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> "HookSettings | None":
        """None where no outer run is named.

        env_vars   the trainer's configuration has these for its environment
        kwargs     the loss's own settings

        Raises ConfigError when two places contradict each other, and when only a part of a run is named.
        """
        said = {name: _one(name, dict(_places(name, environ, env_vars, kwargs))) for name in NAMES}
        uri, site, key, same = (said[name] for name in (OUTER, SITE, KEY, SAME_NAME))
        if not uri:
            for name, value in said.items():
                if value:
                    raise ConfigError(
                        f"{name} is set ({value}) and {OUTER} isn't: set {OUTER} to the run's place in its bucket, "
                        "such as s3://bucket/runs/run-1, or unset both to train without an outer loop"
                    )
            return None
        if not site:
            raise ConfigError(
                f"{SITE}, or trainer.loss.kwargs.site, must be set where an outer run is named ({uri}): give each site "
                "a name of its own, and keep it"
            )
        if same not in ("", "replace", "refuse"):
            raise ConfigError(
                f'{SAME_NAME} ({same}) must be "replace" or "refuse": what to do when a process of its name is alive'
            )
        up, down = (_mbit(name, said[name]) for name in (MBIT_UP, MBIT_DOWN))
        return cls(uri, site, Path(key).expanduser() if key else None, same != "refuse", up, down)


def distill_settings(
    environ: Mapping[str, str], env_vars: Mapping[str, str] = MappingProxyType({})
) -> "DistillConfig | None":
    """The recipe's `[trainer.distill]`; None where no distributions are asked for: without the table, or at top_k = 0.

    Raises ConfigError for what isn't such a table.
    """
    said = _one(DISTILL, dict(_places(DISTILL, environ, env_vars, {})))
    if not said:
        return None
    from pydantic import ValidationError

    from composer_prime.config.distill import DistillConfig
    from composer_prime.config.messages import describe

    try:
        config = DistillConfig.model_validate_json(said)
    except ValidationError as error:
        raise ConfigError(
            f"{DISTILL} ({said}) isn't [trainer.distill] as JSON: {describe(DistillConfig, error)}"
        ) from error
    return config if config.top_k else None


def check_distill(table: object) -> "DistillConfig":
    """A recipe's table, as it will be said in the environment. Raises ConfigError where it has a fault."""
    from pydantic import ValidationError

    from composer_prime.config.distill import DistillConfig
    from composer_prime.config.messages import describe

    try:
        config = DistillConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"[trainer.distill] can't be used: {describe(DistillConfig, error)}") from error
    if config.divergence == "taid":
        raise ConfigError(
            '[trainer.distill] divergence ("taid") keeps a schedule, for which PRIME-RL\'s checkpoints have no place: '
            "use another divergence"
        )
    return config


def check_hints(table: object, top_k: int, source: str) -> None:
    """Raise ConfigError where a source's `env.hints` has a fault, as the source itself would say too late."""
    from pydantic import ValidationError

    from composer_prime.config.messages import describe
    from composer_prime.config.teachers import HintsConfig

    try:
        HintsConfig.model_validate(table).check_stamped(top_k)
    except ValidationError as error:
        fault = f"env.hints can't be used: {describe(HintsConfig, error)}"
    except ValueError as error:
        fault = str(error)
    else:
        return
    raise ConfigError(f"orchestrator.train.source {source}: {fault}")


def _places(
    name: str, environ: Mapping[str, str], env_vars: Mapping[str, str], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """(where it is said, what) of one setting. Raises ConfigError for a run that is named by nothing."""
    found = [
        (f"{name} in the environment", environ.get(name)),
        (f"trainer.env_vars.{name}", env_vars.get(name)),
        *((f"trainer.loss.kwargs.{key}", kwargs.get(key)) for key in [KWARGS.get(name)] if key is not None),
    ]
    for place, value in found:
        if value is None:
            continue
        if not isinstance(value, str):
            raise ConfigError(f"{place} ({value!r}) must be text: put it in quotes")
        if value.strip():
            yield place, value.strip()
        elif name == OUTER:
            raise ConfigError(
                f"{place} is there and names no bucket: set it to the run's place, such as s3://bucket/runs/run-1, or "
                "take it away to train without an outer loop"
            )


def _one(name: str, said: Mapping[str, str]) -> str:
    """What all places say of a setting; "" where none does. Raises ConfigError where they differ."""
    firsts: dict[str, str] = {}
    for place, value in said.items():
        firsts.setdefault(value, place)
    if len(firsts) > 1:
        (value, place), (contrary, other), *_ = firsts.items()
        raise ConfigError(f"{place} is {value} and {other} is {contrary}: say {name} in one place, or the same in both")
    return next(iter(firsts), "")


def _mbit(name: str, value: str) -> float | None:
    """A limit of the link in Mbit/s; None where none is given. Raises ConfigError for what isn't one."""
    if not value:
        return None
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(f"{name} ({value}) must be a number above 0, in Mbit/s: correct it, or unset it for no limit")
    return found
