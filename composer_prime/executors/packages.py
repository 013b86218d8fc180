"""What a job installs where no image is named: this package and its recipe's environments, as this machine has them.

All travel as wheels: a name that is looked up in an index could be another's package.
"""

import base64
import csv
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from composer_prime.errors import BadInput
from composer_prime.store.base import MAX_CREATE_BYTES

OURS = "composer-prime"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: equal files give equal wheels."""


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
    """The distributions that a job is handed, by name.

    on_prime_rl   whether they go beside PRIME-RL, whose own packages stay as they are
    """

    names: tuple[str, ...]
    on_prime_rl: bool = False

    def wheels(self) -> tuple[Wheel, ...]:
        """Made at the first call. Raises BadInput for one that can't be, that isn't pure Python or is too large."""
        return tuple(map(_wheel_of, self.names))

    def __str__(self) -> str:
        return ", ".join(f"{name} {_distribution(name).version} of this machine" for name in self.names)


def packages_of(modules: Iterable[str], *, on_prime_rl: bool = False) -> Packages:
    """This package and the distributions that hold these environments, less those that verifiers brings.

    Raises BadInput for a module that isn't installed here.
    """
    names = dict.fromkeys((OURS, *(_name_of(module) for module in modules if not _is_bundled(module))))
    return Packages(tuple(names), on_prime_rl)


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
    likely = (each for each in (module, module.partition(".")[0]) if _is_installed(each))
    for found in (*map(importlib.metadata.distribution, likely), *importlib.metadata.distributions()):
        folder = _editable_folder(found)
        if folder is not None and origin.is_relative_to(folder):
            return found.metadata["Name"]
        if folder is None and any(Path(str(file.locate())) == origin for file in found.files or ()):
            return found.metadata["Name"]
    raise BadInput(f"environment {module} ({origin}) is in no installed package: pip install it, or name an image")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _distribution(name: str) -> Distribution:
    if not _is_installed(name):
        raise BadInput(f"{name} is no installed package: pip install it, or name an image that has it")
    return importlib.metadata.distribution(name)


def _editable_folder(distribution: Distribution) -> Path | None:
    """The source folder of an editable installation (PEP 610)."""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not direct.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(urlsplit(direct["url"]).path))


@functools.cache
def _wheel_of(name: str) -> Wheel:
    distribution = _distribution(name)
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
            return _written(made[0].name, {name: file.read(name) for name in file.namelist()})


def _packed(distribution: Distribution) -> Wheel:
    """A wheel of the files that an installed distribution is made of."""
    files = {path.as_posix(): path for path in distribution.files or ()}
    (record,) = [name for name in files if name.endswith(".dist-info/RECORD")]
    info = record.removesuffix("RECORD")
    installers = {f"{info}{name}" for name in ("INSTALLER", "REQUESTED", "direct_url.json")}
    kept = {
        name: Path(str(path.locate())).read_bytes()
        for name, path in files.items()
        if not (name.startswith("../") or "__pycache__" in name or name in installers)
    }
    return _written(f"{info.removesuffix('.dist-info/')}-py3-none-any.whl", kept)


def _written(file: str, contents: Mapping[str, bytes]) -> Wheel:
    """A wheel of these files, with a RECORD of them; equal for equal files. Raises BadInput for a platform's own."""
    (record,) = [name for name in contents if name.endswith(".dist-info/RECORD")]
    about = HeaderParser().parsestr(contents[record.replace("RECORD", "WHEEL")].decode())
    tags = about.get_all("Tag") or []
    if about["Root-Is-Purelib"] != "true" or not all(tag.endswith("-none-any") for tag in tags):
        raise BadInput(
            f"{file} ({', '.join(tags)}) isn't pure Python, and a job's machine may be another: name an image"
        )
    files = {name: data for name, data in sorted(contents.items()) if name != record}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in (*files.items(), (record, _record_of(files, record).encode())):
            wheel.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return Wheel(file, packed.getvalue())


def _record_of(files: Mapping[str, bytes], record: str) -> str:
    """The text of a wheel's RECORD."""
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(data)))
    rows.writerow((record, "", ""))
    return lines.getvalue()
