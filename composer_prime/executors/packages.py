"""What a job installs where no image is named: this package and its recipe's environments, as this machine has them.

A distribution that came from an index is named with its version, and the job takes it from there. One that came from
elsewhere, such as a checkout, travels as a wheel.
"""

import base64
import csv
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from composer_prime.errors import BadInput

OURS = "composer-prime"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: equal files give equal wheels."""


@dataclass(frozen=True)
class Wheel:
    """A distribution's wheel. file: its name, NAME-VERSION-py3-none-any.whl."""

    file: str
    data: bytes

    @property
    def sha256(self) -> str:
        """In hex."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Packages:
    """What a job installs.

    requirements   of distributions that came from an index
    handed         names of those that came from elsewhere, and that the job is handed as wheels
    """

    requirements: tuple[str, ...] = ()
    handed: tuple[str, ...] = ()

    def wheels(self) -> tuple[Wheel, ...]:
        """Of those that are handed, built at the first call. Raises BadInput for one that is no pure Python."""
        return tuple(_wheel_of(name) for name in self.handed)

    def __str__(self) -> str:
        versions = [f"{name} {importlib.metadata.version(name)} of this machine" for name in self.handed]
        return ", ".join([*versions, *self.requirements])


def packages_of(modules: Iterable[str]) -> Packages:
    """This package and the distributions that hold these modules, as this machine has them.

    Raises BadInput for a module that isn't installed here.
    """
    found = {each.metadata["Name"]: each for each in map(_distribution, (OURS, *map(_name_of, modules)))}
    handed = [name for name, each in found.items() if each.read_text("direct_url.json") is not None]  # PEP 610
    listed = [f"{name}=={each.version}" for name, each in found.items() if name not in handed]
    return Packages(tuple(listed), tuple(handed))


def _name_of(module: str) -> str:
    """The distribution that an importable module is from."""
    package = module.partition(".")[0]
    names: Mapping[str, list[str]] = importlib.metadata.packages_distributions()
    if package in names:
        return names[package][0]
    if importlib.util.find_spec(package) is None:
        raise BadInput(f"environment {module} isn't installed here ({package} can't be imported): install it")
    return package  # an editable one names no modules


def _distribution(name: str) -> Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise BadInput(f"{name} is no installed package: pip install it, or name an image that has it") from error


@functools.cache
def _wheel_of(name: str) -> Wheel:
    distribution = _distribution(name)
    url = urlsplit(json.loads(distribution.read_text("direct_url.json") or "{}").get("url", ""))
    source = Path(url2pathname(url.path))
    return _built(source) if url.scheme == "file" and source.is_dir() else _packed(distribution)


def _built(source: Path) -> Wheel:
    """The wheel of a source folder, by its own build backend."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as scratch:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        made = [*Path(scratch).glob("*.whl")]
        if done.returncode or len(made) != 1:
            raise BadInput(
                f"no wheel could be built of {source} ({' '.join(done.stderr.split())[-500:]}): see pip wheel"
            )
        with zipfile.ZipFile(made[0]) as file:
            return _written(made[0].name, {name: file.read(name) for name in file.namelist()})


def _packed(distribution: Distribution) -> Wheel:
    """A wheel of the files that an installed distribution is made of."""
    name, version = distribution.metadata["Name"].replace("-", "_"), distribution.version
    info = f"{name}-{version}.dist-info/"
    kept: dict[str, bytes] = {}
    for path in distribution.files or ():
        text = path.as_posix()
        installers = text.startswith(info) and text.removeprefix(info) in ("INSTALLER", "REQUESTED", "direct_url.json")
        if not (text.startswith("../") or "__pycache__" in text or installers):
            kept[text] = Path(str(path.locate())).read_bytes()
    return _written(f"{name}-{version}-py3-none-any.whl", kept)


def _written(file: str, contents: Mapping[str, bytes]) -> Wheel:
    """A wheel of these files, with a RECORD of them; equal for equal files. Raises BadInput for a platform's own."""
    if not file.endswith("-none-any.whl"):
        raise BadInput(f"{file} isn't pure Python, and a job's machine may be another: name an image that has it")
    (record,) = [name for name in contents if name.endswith(".dist-info/RECORD")]
    files = {name: data for name, data in sorted(contents.items()) if name != record}
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(data)))
    rows.writerow((record, "", ""))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in (*files.items(), (record, lines.getvalue().encode())):
            wheel.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return Wheel(file, packed.getvalue())
