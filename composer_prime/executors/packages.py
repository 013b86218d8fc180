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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from composer_prime.errors import BadInput
from composer_prime.store.base import MAX_CREATE_BYTES

UV_IMAGE = "ghcr.io/astral-sh/uv:0.9.7-python3.12-bookworm-slim"
"""A Python and uv, nothing else."""
PRIME_RL_IMAGES = {"0.8.0": "ghcr.io/primeintellect-ai/prime-rl:v0.8.0"}
"""PRIME-RL's own by version, with uv; the environment in it is that of its lock."""
PRIME_RL_COMMITS = {"559b447": "559b44772e471d1538537b8805cc77f3824a5e64"}
"""The versions without an image, which a job installs from their locks."""
CUDA_IMAGE = "nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04"
"""What PRIME-RL's own images are built on: its torch's CUDA, the compiler of kernels that are made in a run, and the
Python 3.12 that it needs."""
CUDA_VARIABLES = {
    "CUDA_HOME": "/usr/local/cuda",
    "PATH": "/app/.venv/bin:/opt/uv/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:"
    "/usr/sbin:/usr/bin:/sbin:/bin",
}
"""What PRIME-RL's own images set beside it."""
PRIME_RL_UV = "uv==0.13.8"
"""A uv that reads its rules, which ask for 0.11.1 or newer."""
PRIME_RL_VENV = "/app/.venv"
CONSTRAINTS = "/tmp/composer-prime-constraints.txt"
"""What the image has, which nothing that is installed may exchange."""
PRIME_RL_LACKS = ("detect-secrets", "obstore", "zstandard")
"""The packages that we need beside PRIME-RL's lock, its environments' packages included."""
_LOCKED = {
    "aiohttp": "3.13.5", "datasets": "4.6.1", "httpx": "0.28.1", "huggingface-hub": "1.16.1", "numpy": "2.3.5",
    "openai": "2.38.0", "pandas": "3.0.3", "pydantic": "2.13.4", "torch": "2.11.0", "transformers": "5.6.2",
    "vllm": "0.26.0",
}  # fmt: skip
PRIME_RL_HAS = {
    "0.8.0": {**_LOCKED, "verifiers": "0.2.2.dev76"},
    "559b447": {**_LOCKED, "verifiers": "0.3.1.dev62"},
}
"""By version what environments most often need of what it has: its uv.lock's, and its verifiers' own."""
_THERE = {"extra": "", "python_version": "3.12", "sys_platform": "linux", "platform_system": "Linux"}
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
    pins          requirements on an index: what this package needs, where they are alone at this machine's versions
    prime_rl      the version of PRIME-RL beside which they go, and whose own packages stay as they are; None: alone
    """

    names: tuple[str, ...]
    pins: tuple[str, ...] = ()
    prime_rl: str | None = None

    def wheels(self) -> tuple[Wheel, ...]:
        """Made at the first call. Raises BadInput for one that can't be, that isn't pure Python or is too large."""
        return _wheels_of(self.names)

    def __str__(self) -> str:
        lock = [f"PRIME-RL {self.prime_rl} from its lock"] if self.preparation else []
        return ", ".join(
            [*lock, *(f"{name} {importlib.metadata.version(name)} of this machine" for name in self.names)]
        )

    @property
    def image(self) -> str:
        """The public image on which they are installed."""
        return UV_IMAGE if self.prime_rl is None else PRIME_RL_IMAGES.get(self.prime_rl, CUDA_IMAGE)

    @property
    def preparation(self) -> list[str]:
        """The shell's commands that come first on that image, by which it gets PRIME-RL, as in infra/docker/Dockerfile;
        none where it has it. CUDA_VARIABLES hold after them."""
        if (commit := PRIME_RL_COMMITS.get(self.prime_rl or "")) is None:
            return []
        github, extras = "https://github.com/", "--extra flash-attn --extra flash-attn-3 --extra disagg"
        submodules = " ".join(f"deps/{each}" for each in ("pydantic-config", "verifiers", "renderers", "prime-envs"))
        return [
            "apt-get update --quiet",
            "DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends build-essential "
            "ca-certificates git libibverbs-dev libnuma-dev ninja-build python3 python3-dev python3-venv",
            f"python3 -m venv /opt/uv && /opt/uv/bin/pip install --quiet {PRIME_RL_UV}",
            "git init --quiet /app",
            f"git -C /app fetch --quiet --depth 1 {github}PrimeIntellect-ai/prime-rl.git {commit}",
            "git -C /app checkout --quiet FETCH_HEAD",
            # By ssh addresses, and with their history, which holds their versions.
            f"git -C /app -c url.{github}.insteadOf=git@github.com: submodule --quiet update --init {submodules}",
            "/opt/uv/bin/uv sync --quiet --project /app --python-preference only-system --frozen --no-dev "
            f"--all-packages {extras}",
        ]

    @property
    def links(self) -> list[str]:
        """The variables by which a job finds its wheels, in their order."""
        return [f"{LINK_VARIABLE}{number}" for number in range(len(self.names))]

    def before(self, command: Sequence[str], *, has_gpu: bool) -> list[str]:
        """A job's command with the installation before it, from its links. A step that fails ends the job with 1; it
        says no link."""
        wheels, backend = self.wheels(), "auto" if has_gpu else "cpu"  # the first is what the machine's driver can run
        named = shlex.join(each for wheel in wheels for each in (wheel.file, wheel.sha256))
        variables = [f"export {name}={value}" for name, value in CUDA_VARIABLES.items()] if self.preparation else []
        steps = (
            *self.preparation,
            *variables,
            "wheels=$(mktemp -d)",
            f'python3 -c {shlex.quote(_FETCH)} "$wheels" {named}',
            f"unset {' '.join(self.links)}",
            *self.commands([f'"$wheels"/{shlex.quote(wheel.file)}' for wheel in wheels], backend),
        )
        return ["sh", "-c", "\n".join([*(f"{step} || exit 1" for step in steps), 'exec "$@"']), "sh", *command]

    def commands(self, wheels: Sequence[str], backend: str | None) -> list[str]:
        """The shell's commands that install wheels on the stock image, after its `preparation`.

        wheels    their files, as words of the shell
        backend   uv's name of the torch that they need; None: what the index has, which is for GPUs on Linux
        """
        install = "uv pip install --no-config --quiet"  # no rules of the folder it runs in
        files = " ".join(wheels)
        if self.prime_rl is not None:
            ours = [wheel for wheel in wheels if "composer_prime-" in wheel]
            others = " ".join(wheel for wheel in wheels if wheel not in ours)
            image = f"--python {PRIME_RL_VENV}"
            return [
                f"{install} {image} --no-deps {' '.join(ours)}",
                f"uv pip list --no-config --quiet {image} --format freeze > {CONSTRAINTS}",
                f"{install} {image} --constraints {CONSTRAINTS} {shlex.join(self.pins)} {others}".rstrip(),
                "python3 -m composer_prime.sites.prime_rl",
            ]
        torch = "" if backend is None else f" --torch-backend {backend}"
        return [f"{install} --system{torch} {shlex.join(self.pins)} {files}"]


def packages_of(modules: Iterable[str], *, needs: Iterable[str] = (), prime_rl: str | None = None) -> Packages:
    """This package and the distributions that hold these environments, less those that verifiers brings.

    needs     further packages from PyPI
    prime_rl  the version of PRIME-RL beside which they go; None: alone

    Raises BadInput for a module that isn't installed here, and for one that needs another version of what is there.
    """
    ours = _name_of("composer_prime")
    names = [_name_of(module) for module in modules if not _is_bundled(module)]
    for name in names:  # which grows by what each needs that is from no index
        local = [each for each in _needs(name) if _direct(importlib.metadata.distribution(each))]
        names += [each for each in local if each not in names]
    wanted = [*(_needs(ours) if prime_rl is None else PRIME_RL_LACKS), *needs]
    # Without the local part of a version ("+cpu"), which PyPI doesn't have.
    here = {name: version.partition("+")[0] for name in wanted if (version := _version(name))}
    # Beside PRIME-RL's own packages, these decide.
    pins = [f"{name}=={here[name]}" if prime_rl is None and name in here else name for name in wanted]
    place = "this machine" if prime_rl is None else f"PRIME-RL {prime_rl} (prime_rl.version)"
    _check([name for name in names if name != ours], here if prime_rl is None else PRIME_RL_HAS[prime_rl], place)
    return Packages(tuple(dict.fromkeys([ours, *names])), tuple(pins), prime_rl)


def _check(names: Iterable[str], held: Mapping[str, str], place: str) -> None:
    """Raise BadInput for a distribution that needs another version of what a place has, by name."""
    for name in names:
        for needed in map(Requirement, importlib.metadata.requires(name) or ()):
            version = held.get(canonicalize_name(needed.name))
            applies = needed.marker is None or needed.marker.evaluate(_THERE)
            if version is not None and applies and not needed.specifier.contains(version, prereleases=True):
                raise BadInput(
                    f"{name} needs {needed.name}{needed.specifier}, and {place} has {version}: loosen that, take "
                    "another version, or name an image that has both"
                )


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
