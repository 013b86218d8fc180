"""From what stands after `--on` to platforms: `local`, `modal:4,hf-jobs:2`, `ssh:gpu1,ssh:gpu2`.

A platform is imported when it is asked for, so that the command line starts fast and nobody needs a vendor's package
for another vendor.
"""

import difflib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer_prime.errors import INSTALL, BadInput
from composer_prime.executors.base import Executor

Opener = Callable[[str], Executor]
MAX_SITES = 64
"""Of one launch command."""


@dataclass(frozen=True)
class Platform:
    """Where a platform's executor is, module:class below this package.

    extra      of our package, which installs what the executor imports; "": nothing is needed
    package    its name on PyPI
    has_host   whether a host's name follows the platform's, after a colon: it takes one job
    """

    executor: str
    extra: str = ""
    package: str = ""
    has_host: bool = False


PLATFORMS = {
    "local": Platform("local:LocalExecutor"),
    "modal": Platform("modal:ModalExecutor", "modal", "modal"),
    "hf-jobs": Platform("hf_jobs:HfJobsExecutor", "hf", "huggingface_hub"),
    "sky": Platform("sky:SkyExecutor"),
    "ssh": Platform("ssh:SshExecutor", "ssh", "asyncssh", has_host=True),
}


def open_executor(on: str) -> Executor:
    """The executor of one platform, "modal" or "ssh:HOST". Raises BadInput: unknown, its package not installed."""
    name, _, host = on.partition(":")
    platform = _platform(name, on)
    if platform.has_host != bool(host):
        raise BadInput(f"--on ({on}) must be {name + ':HOST' if platform.has_host else name}: correct it")
    try:
        make: Any = pkgutil.resolve_name(f"composer_prime.executors.{platform.executor}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("composer_prime"):
            raise
        raise BadInput(
            f"--on {name} needs a package that isn't installed ({error.name}): {INSTALL.format(platform.extra)}"
        ) from error
    return make(host) if host else make()


def parse_on(option: str) -> list[tuple[str, int | None]]:
    """(platform or ssh:HOST, how many jobs) of what stands after `--on`; None: all that there are to be.

    Raises BadInput for what names no platform, a count that is none, and several parts without one.
    """
    parts: list[tuple[str, int | None]] = []
    for part in map(str.strip, option.split(",")):
        name, colon, rest = part.partition(":")
        if has_host := _platform(name, option).has_host:
            if not rest:
                raise BadInput(f"--on ({option}) names no host: write ssh:[user@]address[:port], and one for each site")
        elif colon and not (rest.isascii() and rest.isdigit() and 1 <= int(rest) <= MAX_SITES):
            wanted = f"a number of sites, 1 to {MAX_SITES}, as {name}:2"
            raise BadInput(f"--on ({option}): {name} must be followed by {wanted}")
        parts.append((part, 1) if has_host else (name, int(rest) if colon else None))
    names = [name for name, _ in parts]
    for name, count in parts if len(parts) > 1 else []:
        if names.count(name) > 1:
            raise BadInput(f"--on ({option}) names {name} twice: name it once")
        if count is None:
            raise BadInput(f"--on ({option}) doesn't say how many sites {name} gets: write {name}:2, say")
        if name == "local":
            raise BadInput(f"--on ({option}) mixes this machine with others, which can't reach it: drop it")
    return parts


def _platform(name: str, option: str) -> Platform:
    if name not in PLATFORMS:
        near = difflib.get_close_matches(name, PLATFORMS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(PLATFORMS)}"
        raise BadInput(f"--on ({option}): {name!r} is no platform: {remedy}")
    return PLATFORMS[name]
