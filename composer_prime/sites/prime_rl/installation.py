"""Finds the PRIME-RL that a recipe's sites run on: its entrypoint, and whose keys it reads."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from composer_prime.config.prime_rl import PrimeRlConfig
from composer_prime.errors import ConfigError
from composer_prime.sites.prime_rl.toml import NEWER, VERSIONS
from composer_prime.sites.prime_rl.versions import TESTED

_QUESTION = "composer_prime.sites.prime_rl"
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Installation:
    """What `rl` is on this machine.

    command  the entrypoint's words, the first one found
    version  whose keys it reads, of `toml.VERSIONS`
    """

    command: tuple[str, ...]
    version: str


def find_installation(settings: PrimeRlConfig) -> Installation:
    """The installation that the recipe names. Raises ConfigError where there is none, or none we know."""
    first, *rest = settings.command
    found = shutil.which(first)
    if found is None:
        raise ConfigError(
            f"prime_rl.command ({' '.join(settings.command)}) isn't on the PATH: install PRIME-RL ({TESTED}) and "
            "activate its environment, or give the path of its rl"
        )
    version = settings.version
    if version == "auto":
        # The entrypoint's Python lies beside it, or a runner such as uv finds it.
        beside = str(Path(found).resolve().parent / "python")
        version = _ask([*settings.command[:-1], "python"] if rest else [beside])
    return Installation((found, *rest), version)


def _ask(python: list[str]) -> str:
    """The version that this Python has, the newer one where we don't know it.

    Raises ConfigError when it has none, or not our package.
    """
    named = " ".join(python)
    try:
        done = subprocess.run([*python, "-m", _QUESTION], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        raise ConfigError(
            f"the Python of prime_rl.command isn't at {named}: name rl in its environment's bin folder, or set "
            "prime_rl.version"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{named} didn't say in {_TIMEOUT_S:g} s which PRIME-RL it has: set prime_rl.version"
        ) from None
    if done.returncode == 0:
        said = done.stdout.strip().removeprefix("v")
        return said if said in VERSIONS else NEWER
    last = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
    if last.startswith("error: "):
        raise ConfigError(last.removeprefix("error: "))
    raise ConfigError(
        f"composer-prime doesn't run in PRIME-RL's Python {named} ({last}), whose trainer imports its loss: install it "
        "there too, as docs/prime-rl.md says"
    )
