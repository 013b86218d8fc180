"""The packages of a job without an image: this one and its recipe's environments, as this machine has them.

These travel as wheels, and with them whatever they need that came to this machine from a folder or an address. The rest
comes from PyPI by name, as any installation has it. All is installed on a stock image.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from composer_prime.errors import BadInput
from composer_prime.store.base import MAX_CREATE_BYTES

UV_IMAGE = "ghcr.io/astral-sh/uv:0.9.7-python3.12-bookworm-slim"
"""A Python and uv, nothing else."""
PRIME_RL_VERSION = "0.8.0"
PRIME_RL_IMAGE = f"ghcr.io/primeintellect-ai/prime-rl:v{PRIME_RL_VERSION}"
"""PRIME-RL's own, with uv; its environment is the one of its lock."""
PRIME_RL_VENV = "/app/.venv"
CONSTRAINTS = "/tmp/composer-prime-constraints.txt"
"""What the image has, which nothing that is installed may exchange."""
PRIME_RL_LACKS = ("botocore", "cryptography", "matplotlib", "typer", "zstandard")
"""The packages that we need beside PRIME-RL's lock."""
LINK_VARIABLE = "COMPOSER_PRIME_WHEEL_"
"""With a number from 0: where a job finds a wheel. A secret, since who has a link can read the wheel."""
_FETCH = """\
import hashlib, os, pathlib, sys, urllib.request
folder = pathlib.Path(sys.argv[1])
for number, (file, sha256) in enumerate(zip(sys.argv[2::2], sys.argv[3::2])):
    data = urllib.request.urlopen(os.environ[f"COMPOSER_PRIME_WHEEL_{number}"], timeout=300).read()
    if hashlib.sha256(data).hexdigest() != sha256:
        sys.exit(f"{file} in the bucket isn't the one that was launched: its sha256 differs")
    (folder / file).write_bytes(data)
"""


class Wheel(NamedTuple):
    """A distribution's wheel. file: its name, NAME-VERSION-py3-none-any.whl; sha256: in hex."""

    file: str
    data: bytes
    sha256: str


@dataclass(frozen=True)
class Packages:
    """The packages that a job installs.

    names         of the distributions that it is handed as wheels
    pins          requirements on an index that keep what this package needs at this machine's versions
    on_prime_rl   whether they go beside PRIME-RL, whose own packages stay as they are
    """

    names: tuple[str, ...]
    pins: tuple[str, ...] = ()
    on_prime_rl: bool = False

    def wheels(self) -> tuple[Wheel, ...]:
        """Made at the first call. Raises BadInput for one that can't be, that isn't pure Python or is too large."""
        return _wheels_of(self.names)

    def __str__(self) -> str:
        return ", ".join(f"{name} {importlib.metadata.version(name)} of this machine" for name in self.names)

    @property
    def image(self) -> str:
        """The public image on which they are installed."""
        return PRIME_RL_IMAGE if self.on_prime_rl else UV_IMAGE

    @property
    def links(self) -> list[str]:
        """The variables by which a job finds its wheels, in their order."""
        return [f"{LINK_VARIABLE}{number}" for number in range(len(self.names))]

    def before(self, command: Sequence[str], *, has_gpu: bool) -> list[str]:
        """A job's command with the installation before it, from its links. A step that fails ends the job with 1; it
        says no link."""
        wheels, backend = self.wheels(), "auto" if has_gpu else "cpu"  # the first is what the machine's driver can run
        named = shlex.join(each for wheel in wheels for each in (wheel.file, wheel.sha256))
        steps = (
            "wheels=$(mktemp -d)",
            f'python3 -c {shlex.quote(_FETCH)} "$wheels" {named}',
            f"unset {' '.join(self.links)}",
            *self.commands([f'"$wheels"/{shlex.quote(wheel.file)}' for wheel in wheels], backend),
        )
        return ["sh", "-c", "\n".join([*(f"{step} || exit 1" for step in steps), 'exec "$@"']), "sh", *command]

    def commands(self, wheels: Sequence[str], backend: str | None) -> list[str]:
        """The shell's commands that install wheels on the stock image.

        wheels    their files, as words of the shell
        backend   uv's name of the torch that they need; None: what the index has, which is for GPUs on Linux
        """
        install = "uv pip install --no-config --quiet"  # no rules of the folder it runs in
        files = " ".join(wheels)
        if self.on_prime_rl:
            ours = [wheel for wheel in wheels if "composer_prime-" in wheel]
            others = " ".join(wheel for wheel in wheels if wheel not in ours)
            image = f"--python {PRIME_RL_VENV}"
            return [
                f"{install} {image} --no-deps {' '.join(ours)}",
                f"uv pip freeze --no-config --quiet {image} | grep == > {CONSTRAINTS}",
                f"{install} {image} --constraints {CONSTRAINTS} {shlex.join(self.pins)} {others}".rstrip(),
                "python3 -m composer_prime.sites.prime_rl",
            ]
        torch = "" if backend is None else f" --torch-backend {backend}"
        return [f"{install} --system{torch} {shlex.join(self.pins)} {files}"]


def packages_of(modules: Iterable[str], *, needs: Iterable[str] = (), on_prime_rl: bool = False) -> Packages:
    """This package and the distributions that hold these environments, less those that verifiers brings.

    needs   further packages from PyPI

    Raises BadInput for a module that isn't installed here.
    """
    ours = _name_of("composer_prime")
    names = [_name_of(module) for module in modules if not _is_bundled(module)]
    for name in names:  # which grows by what each needs that is from no index
        local = [each for each in _needs(name) if _direct(importlib.metadata.distribution(each))]
        names += [each for each in local if each not in names]
    wanted = [*(PRIME_RL_LACKS if on_prime_rl else _needs(ours)), *needs]
    # Without the local part of a version ("+cpu"), which PyPI doesn't have.
    pins = [f"{name}=={version.partition('+')[0]}" if (version := _version(name)) else name for name in wanted]
    return Packages(tuple(dict.fromkeys([ours, *names])), tuple(pins), on_prime_rl)


def _is_bundled(module: str) -> bool:
    """Whether it is one of the tasksets that verifiers brings."""
    tasksets = str(importlib.metadata.distribution("verifiers").locate_file("verifiers/v1/tasksets"))
    return any(Path(tasksets, each).exists() for each in (module, f"{module}.py"))


def _name_of(module: str) -> str:
    """The distribution that a module is from."""
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    origin = Path((spec and spec.origin) or "")
    owner = max(importlib.metadata.distributions(), key=lambda found: _depth(found, origin))
    if _depth(owner, origin) == 0:
        raise BadInput(f"{module} isn't installed here by a package: pip install one, or name an image that has it")
    return owner.metadata["Name"]


def _depth(distribution: Distribution, file: Path) -> int:
    """How surely a file is a distribution's: most where it installed it, the depth of an editable one's folder where
    the file is below that, other installations in it left out; 0: it isn't."""
    direct = _direct(distribution)
    if direct.get("dir_info", {}).get("editable"):
        folder = Path(unquote(urlsplit(direct["url"]).path))
        is_below = file.is_relative_to(folder) and "site-packages" not in file.relative_to(folder).parts
        return len(folder.parts) if is_below else 0
    place = os.path.relpath(file, str(distribution.locate_file("")))
    return sys.maxsize if f"\n{place}," in f"\n{distribution.read_text('RECORD')}" else 0


def _version(name: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=name)), None)


def _needs(name: str) -> list[str]:
    """The names of what a distribution needs, extras left out, that are installed here."""
    requirements = [each for each in importlib.metadata.requires(name) or () if "extra ==" not in each]
    return [needed for needed in (re.split(r"[^\w.-]", each)[0] for each in requirements) if _version(needed)]


def _direct(distribution: Distribution) -> dict[str, Any]:
    """The folder or address that it was installed from (PEP 610); nothing for what an index had."""
    return json.loads(distribution.read_text("direct_url.json") or "{}")


def _source(name: str) -> str:
    """The place where pip finds a distribution again: its folder or address, else its version on an index."""
    distribution = importlib.metadata.distribution(name)
    if not (direct := _direct(distribution)):
        return f"{name}=={distribution.version}"
    vcs, below = direct.get("vcs_info"), direct.get("subdirectory")
    url = f"{vcs['vcs']}+{direct['url']}@{vcs['commit_id']}" if vcs else direct["url"]
    return f"{url}#subdirectory={below}" if below else url


@functools.cache
def _wheels_of(names: tuple[str, ...]) -> tuple[Wheel, ...]:
    uv = ["uv", "tool", "run", "--quiet", "--python", sys.executable, "pip"]
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else uv
    env = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}  # equal bytes for equal files; 1980, where zip begins
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        command = [*pip, "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", folder]
        done = subprocess.run([*command, *map(_source, names)], env=env, capture_output=True, text=True)
        if done.returncode:
            said = " ".join(done.stderr.split())[-500:]
            remedy = "install them again, set PIP_EXTRA_INDEX_URL to their index, or name an image"
            raise BadInput(f"pip finds no wheels of {', '.join(names)} ({said}): {remedy}")
        files = [(file.name, file.read_bytes()) for file in sorted(Path(folder).iterdir())]
    for file, data in files:
        if not file.endswith("-none-any.whl"):
            raise BadInput(f"{file} isn't pure Python, and a job's machine may be another: name an image")
        if (size := len(data)) > MAX_CREATE_BYTES:
            raise BadInput(f"{file} ({size} bytes) must be at most {MAX_CREATE_BYTES}: drop files, or name an image")
    return tuple(Wheel(file, data, hashlib.sha256(data).hexdigest()) for file, data in files)
