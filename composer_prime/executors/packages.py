"""What a job installs where no image is named: this package and its recipe's environments, as this machine has them.

These travel as wheels, and with them whatever they need that came to this machine from a folder or an address. The rest
comes from PyPI by name, as any installation has it.
"""

import base64
import csv
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from composer_prime.errors import BadInput
from composer_prime.store.base import MAX_CREATE_BYTES

OURS = "composer_prime"
PRIME_RL_LACKS = ("botocore", "cryptography", "matplotlib", "typer", "zstandard")
"""What we need beside PRIME-RL's lock."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: equal files give equal wheels."""
_INSTALLERS = ("INSTALLER", "REQUESTED", "direct_url.json")
"""Files of an installation that no wheel has."""


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
    """What a job installs.

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


def packages_of(modules: Iterable[str], *, needs: Iterable[str] = (), on_prime_rl: bool = False) -> Packages:
    """This package and the distributions that hold these environments, less those that verifiers brings.

    needs   further packages from PyPI

    Raises BadInput for a module that isn't installed here, and for a distribution with native code.
    """
    ours = _name_of(OURS)
    names = dict.fromkeys([ours])
    for module in modules:
        if not _is_bundled(module):
            names |= dict.fromkeys(_with_local_needs(_name_of(module)))
    for name in names:
        _refuse_native(name)
    pinned = (*(PRIME_RL_LACKS if on_prime_rl else _needs(ours)), *needs)
    return Packages(tuple(names), tuple(map(_pinned, pinned)), on_prime_rl)


def _is_bundled(module: str) -> bool:
    """Whether it is one of the tasksets that verifiers brings."""
    verifiers = importlib.util.find_spec("verifiers")
    folders = [Path(each, "v1", "tasksets") for each in (verifiers and verifiers.submodule_search_locations) or ()]
    return any((folder / module).is_dir() or (folder / f"{module}.py").is_file() for folder in folders)


def _name_of(module: str) -> str:
    """The distribution that a module is from."""
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or spec.origin is None:
        raise BadInput(f"environment {module} isn't installed here: install its package")
    origin = Path(spec.origin)
    if _is_installed(module) and _depth(namesake := importlib.metadata.distribution(module), origin):
        return namesake.metadata["Name"]  # found without a look at all the others
    depths = {found.metadata["Name"]: _depth(found, origin) for found in importlib.metadata.distributions()}
    name = max(depths, key=lambda name: depths[name])
    if depths[name] == 0:
        raise BadInput(f"{module} ({origin}) is in no installed package: pip install it, or name an image that has it")
    return name


def _depth(distribution: Distribution, file: Path) -> float:
    """How surely a file is a distribution's: infinite where it installed it, the depth of an editable one's folder
    where the file is below that, other installations in it left out; 0: it isn't."""
    folder = _editable_folder(distribution)
    if folder is None:
        files = (each for each in distribution.files or () if each.name == file.name)
        return math.inf if any(Path(str(each.locate())) == file for each in files) else 0
    is_below = file.is_relative_to(folder) and "site-packages" not in file.relative_to(folder).parts
    return len(folder.parts) if is_below else 0


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _needs(name: str) -> Iterator[str]:
    """The names of what a distribution needs, extras left out, that are installed here."""
    for requirement in importlib.metadata.requires(name) or ():
        needed = re.match(r"[A-Za-z0-9._-]+", requirement)
        if needed and "extra ==" not in requirement and _is_installed(needed[0]):
            yield needed[0]


def _with_local_needs(name: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """A distribution, and of what it needs, and that needs, all that is from no index (PEP 610)."""
    yield name
    for needed in _needs(name):
        if needed not in seen and importlib.metadata.distribution(needed).read_text("direct_url.json") is not None:
            yield from _with_local_needs(needed, seen | {name})


def _pinned(name: str) -> str:
    """A requirement of this machine's version, without its local part ("+cpu"), which PyPI doesn't have."""
    return f"{name}=={importlib.metadata.version(name).partition('+')[0]}" if _is_installed(name) else name


def _editable_folder(distribution: Distribution) -> Path | None:
    """The source folder of an editable installation (PEP 610)."""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not direct.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(urlsplit(direct["url"]).path))


def _refuse_native(name: str) -> None:
    """Raise BadInput for an installed distribution with native code; an editable one is seen when it is built."""
    distribution = importlib.metadata.distribution(name)
    about = distribution.read_text("WHEEL")
    if _editable_folder(distribution) is None and about is not None:
        _check_pure(f"{name} {distribution.version}", about)


def _check_pure(what: str, about: str) -> None:
    """about: the text of a WHEEL file."""
    said = HeaderParser().parsestr(about)
    tags = said.get_all("Tag") or []
    if said["Root-Is-Purelib"] != "true" or not all(tag.endswith("-none-any") for tag in tags):
        raise BadInput(
            f"{what} ({', '.join(tags)}) isn't pure Python, and a job's machine may be another: name an image"
        )


@functools.cache
def _wheel_of(name: str) -> Wheel:
    distribution = importlib.metadata.distribution(name)
    source = _editable_folder(distribution)
    made = _packed(distribution) if source is None else _built(source)
    if len(made.data) > MAX_CREATE_BYTES:
        raise BadInput(
            f"wheel {made.file} ({len(made.data)} bytes) must be at most {MAX_CREATE_BYTES}: "
            "leave large files out of the package, or name an image that has it"
        )
    return made


def _built(source: Path) -> Wheel:
    """The wheel of a source folder, by its own build backend."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as scratch:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, str(source)]
        uv = ["uv", "build", "--quiet", "--wheel", "--out-dir", scratch, str(source)]
        command = pip if importlib.util.find_spec("pip") or not shutil.which("uv") else uv
        done = subprocess.run(command, capture_output=True, text=True)
        made = [*Path(scratch).glob("*.whl")]
        if done.returncode or len(made) != 1:
            said = " ".join(done.stderr.split())[-500:]
            raise BadInput(f"no wheel could be built of {source} ({said}): mend the package, or name an image")
        with zipfile.ZipFile(made[0]) as file:
            kept = {each.filename: (file.read(each), each.external_attr >> 16) for each in file.infolist()}
    return _written(made[0].name, kept)


def _packed(distribution: Distribution) -> Wheel:
    """A wheel of the files that an installed distribution is made of. Raises BadInput where that can't be told."""
    name = f"{distribution.metadata['Name']} {distribution.version}"
    files = {path.as_posix(): Path(str(path.locate())) for path in distribution.files or ()}
    infos = {name.partition("/")[0] for name in files if name.endswith(".dist-info/RECORD") and name.count("/") == 1}
    if len(infos) != 1:
        raise BadInput(f"{name} was installed without a record of its files: pip install it again, or name an image")
    (info,) = infos
    scripts = {entry.name for entry in distribution.entry_points if entry.group in ("console_scripts", "gui_scripts")}
    kept = {}
    for path, file in files.items():
        elsewhere = path.startswith(("../", "/"))
        if elsewhere and file.stem not in scripts:
            raise BadInput(
                f"{name} has a file outside of its packages ({path}), which no wheel would put there: name an image"
            )
        if not (elsewhere or "__pycache__" in path or path in {f"{info}/{each}" for each in _INSTALLERS}):
            if not file.is_file():
                raise BadInput(f"{name} lacks {path}, which it was installed with: pip install it again")
            kept[path] = (file.read_bytes(), file.stat().st_mode)
    return _written(f"{info.removesuffix('.dist-info')}-py3-none-any.whl", kept)


def _written(file: str, contents: Mapping[str, tuple[bytes, int]]) -> Wheel:
    """A wheel of these files and their modes, with a RECORD of them; equal for equal files.

    Raises BadInput for a platform's own.
    """
    (record,) = [name for name in contents if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
    about = record.replace("RECORD", "WHEEL")
    if about not in contents:
        raise BadInput(f"{file} lacks {about}: install its package again, or name an image")
    _check_pure(file, contents[about][0].decode())
    files = {name: each for name, each in sorted(contents.items()) if name != record}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, (data, mode) in (*files.items(), (record, (_record_of(files, record).encode(), 0))):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = (0o100755 if mode & 0o111 else 0o100644) << 16
            wheel.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return Wheel(file, packed.getvalue())


def _record_of(files: Mapping[str, tuple[bytes, int]], record: str) -> str:
    """The text of a wheel's RECORD."""
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    for name, (data, _) in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(data)))
    rows.writerow((record, "", ""))
    return lines.getvalue()
