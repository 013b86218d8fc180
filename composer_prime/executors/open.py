"""From what stands after `--on` to a platform's executor: `local`, `modal`, `hf-jobs`, `ssh:hosts.toml`.

A platform is imported when it is asked for, so that the command line starts fast and nobody needs a vendor's package
for another vendor.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.executors.base import Executor


@dataclass(frozen=True)
class Platform:
    """Where a platform's executor is.

    extra      of our package, which installs what the executor imports; "": nothing is needed
    takes_file whether a file follows the name, after a colon
    """

    module: str
    name: str
    extra: str = ""
    takes_file: bool = False


PLATFORMS = {
    "local": Platform("local.executor", "LocalExecutor"),
    "modal": Platform("modal.executor", "ModalExecutor", "modal"),
    "hf-jobs": Platform("hf_jobs.executor", "HfJobsExecutor", "hf"),
    "ssh": Platform("ssh.executor", "SshExecutor", "ssh", takes_file=True),
}


def open_executor(option: str) -> Executor:
    """The executor that `option` names. Raises BadInput: unknown, its file missing, its package not installed."""
    name, platform, file = parse_option(option)
    make = _class_of(name, platform)
    return make(Path(file)) if platform.takes_file else make()


def open_recorded(option: str, hosts: Mapping[str, Any], bucket: str) -> Executor:
    """The executor that `option` names, for jobs on hosts as a bucket records them instead of its file."""
    name, platform, _ = parse_option(option)
    return _class_of(name, platform).of_record(hosts, bucket)


def _class_of(name: str, platform: Platform) -> Any:
    try:
        module = importlib.import_module(f"composer_prime.executors.{platform.module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("composer_prime"):
            raise
        raise BadInput(
            f"--on {name} needs a package that isn't installed ({error.name}): "
            f"pip install 'composer-prime[{platform.extra}]'"
        ) from error
    return getattr(module, platform.name)


def absolute_option(option: str) -> str:
    """`option` as it means the same from any folder of this machine: its file by the absolute path."""
    name, _, file = parse_option(option)
    return f"{name}:{Path(file).absolute()}" if file else option


def file_takes(option: str, on: str) -> bool:
    """Whether the file that `option` names is one for the platform of `on`, whatever file that names."""
    name, platform, _ = parse_option(option)
    return platform.takes_file and on.partition(":")[0] == name


def parse_option(option: str) -> tuple[str, Platform, str]:
    """(name, platform, file or "") of what stands after `--on`. Raises BadInput when that is no platform."""
    name, colon, file = option.partition(":")
    platform = PLATFORMS.get(name)
    if platform is None:
        raise BadInput(f"--on ({option}) names no platform: use one of local, modal, hf-jobs and ssh:hosts.toml")
    if platform.takes_file != bool(file) or (colon and not file):
        wanted = f"{name}:hosts.toml, with a file that lists the hosts" if platform.takes_file else f"{name} alone"
        raise BadInput(f"--on ({option}) must be {wanted}: correct it")
    return name, platform, file
