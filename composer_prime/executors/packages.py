"""The packages of a job without an image: this one and its recipe's environments, as this machine has them.

These travel as wheels, and with them whatever they need that came to this machine from a folder or an address. The rest
comes from PyPI by name, as any installation has it. All is installed on a stock image.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from composer_prime.errors import BadInput
from composer_prime.store.base import MAX_CREATE_BYTES

UV_IMAGE = "ghcr.io/astral-sh/uv:0.9.7-python3.12-bookworm-slim"
"""A Python and uv, nothing else."""
PRIME_RL_VERSION = "0.8.0"
PRIME_RL_IMAGE = f"ghcr.io/primeintellect-ai/prime-rl:v{PRIME_RL_VERSION}"
"""PRIME-RL's own, with uv; its environment is the one of its lock."""
PRIME_RL_LACKS = ("botocore", "cryptography", "matplotlib", "typer", "zstandard")
"""The packages that we need beside PRIME-RL's lock."""
_INSTALLERS = (".dist-info/INSTALLER", ".dist-info/REQUESTED", ".dist-info/direct_url.json", ".dist-info/RECORD")
"""Files of an installation that no wheel has, and the one that is cut down to the others."""
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


@dataclass(frozen=True)
class Wheel:
    """A distribution's wheel. file: its name, NAME-VERSION-py3-none-any.whl."""

    file: str
    data: bytes

    @functools.cached_property
    def sha256(self) -> str:
        """In hex."""
        return hashlib.sha256(self.data).hexdigest()


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
        return tuple(map(_wheel_of, self.names))

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
        files = " ".join(wheels)
        if self.on_prime_rl:
            pip = "uv pip install --quiet --python /app/.venv"
            lacking = f"{pip} {shlex.join(self.pins)}"
            return [f"{pip} --no-deps {files}", lacking, "python3 -m composer_prime.sites.prime_rl"]
        torch = "" if backend is None else f" --torch-backend {backend}"
        return [f"uv pip install --quiet --system{torch} {shlex.join(self.pins)} {files}"]


def packages_of(modules: Iterable[str], *, needs: Iterable[str] = (), on_prime_rl: bool = False) -> Packages:
    """This package and the distributions that hold these environments, less those that verifiers brings.

    needs   further packages from PyPI

    Raises BadInput for a module that isn't installed here.
    """
    ours = _name_of("composer_prime")
    names = [_name_of(module) for module in modules if not _is_bundled(module)]
    for name in names:  # which grows by what each needs that is from no index (PEP 610)
        local = [each for each in _needs(name) if importlib.metadata.distribution(each).read_text("direct_url.json")]
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
    if (folder := _editable_folder(distribution)) is not None:
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


def _editable_folder(distribution: Distribution) -> Path | None:
    """The source folder of an editable installation (PEP 610)."""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    is_editable = direct.get("dir_info", {}).get("editable")
    return Path(unquote(urlsplit(direct["url"]).path)) if is_editable else None


@functools.cache
def _wheel_of(name: str) -> Wheel:
    distribution = importlib.metadata.distribution(name)
    source = _editable_folder(distribution)
    made = _packed(distribution) if source is None else _built(source)
    if not made.file.endswith("-none-any.whl"):
        raise BadInput(f"{made.file} isn't pure Python, and a job's machine may be another: name an image")
    if (size := len(made.data)) > MAX_CREATE_BYTES:
        raise BadInput(f"{made.file} ({size} bytes) must be at most {MAX_CREATE_BYTES}: drop files, or name an image")
    return made


def _built(source: Path) -> Wheel:
    """The wheel of a source folder, by its own build backend, which dates it as it is told."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as scratch:
        pip, uv = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir"], ["uv", "build", "--wheel", "-o"]
        command = [*(pip if importlib.util.find_spec("pip") else uv), scratch, "--quiet", str(source)]
        env = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}  # 1980, which zipfile has of itself
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            said = " ".join(done.stderr.split())[-500:]
            raise BadInput(f"no wheel could be built of {source} ({said}): mend the package, or name an image")
        (made,) = Path(scratch).glob("*.whl")
        return Wheel(made.name, made.read_bytes())


def _packed(distribution: Distribution) -> Wheel:
    """A wheel of the files that an installed distribution is made of, with their modes, and of its RECORD of them;
    equal for equal files. Raises BadInput where that can't be told."""
    about, scripts = distribution.read_text("WHEEL"), {entry.name for entry in distribution.entry_points}
    files = {path.as_posix(): Path(str(path.locate())) for path in distribution.files or ()}
    outside = {path for path in files if path.startswith(("../", "/"))}
    stray = [path for path in outside if files[path].stem not in scripts]
    record = next((path for path in files if path.endswith(".dist-info/RECORD")), None)
    if stray or not record or not about:
        why = f"has {stray[0]} outside of its packages" if stray else "was installed without a record of its files"
        raise BadInput(f"{distribution.metadata['Name']} {why}: pip install it again, or name an image that has it")
    kept = sorted(
        path
        for path in files.keys() - outside
        if not (path.endswith(_INSTALLERS) or "__pycache__" in path) and files[path].is_file()
    )
    rows = files[record].read_text(encoding="utf-8").splitlines()
    of_kept = "\n".join(row for row in rows if row.split(",")[0] in {*kept, record})
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as wheel:
        for path in [*kept, record]:
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o100755 if os.access(files[path], os.X_OK) else 0o100644) << 16
            data = of_kept.encode() if path == record else files[path].read_bytes()
            wheel.writestr(entry, data, zipfile.ZIP_DEFLATED)
    native = re.search(r"^Tag: *(.+)(?<!-none-any)$", about, re.MULTILINE)
    tag = native[1] if native else "py3-none-any"
    return Wheel(f"{record.removesuffix('.dist-info/RECORD')}-{tag}.whl", packed.getvalue())
