"""What stands for a stock image with Python and uv: a fresh environment that has the packages of an index, and none of
ours.

The index's are links to those of this environment, so that pip finds them installed and asks no index. `uv` is pip.
"""

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from composer_prime.executors.packages import UV_IMAGE
from tests.architecture import REPOSITORY

OURS = ("composer_prime", "reverse_letters", "sort_letters", "tiny_policy", "tool_letters", "_editable", "__editable__")

UV = """\
#!{python}
import subprocess, sys
words = iter(sys.argv[1:])
assert [next(words), next(words)] == ["pip", "install"]
kept = []
for word in words:
    if word == "--torch-backend":
        assert next(words) in ("cpu", "auto")
    elif word not in ("--system", "--no-config"):
        kept.append(word)
pip = [{python!r}, "-m", "pip", "--python", {inside!r}, "install", "--no-index", "--no-cache-dir"]
sys.exit(subprocess.run([*pip, "--disable-pip-version-check", *kept]).returncode)
"""


def make_stock_image(folder: Path) -> Path:
    """A new one; the folder of its programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    inside = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    here = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    for entry in {entry.name: entry for path in reversed(here) for entry in path.iterdir()}.values():
        if not entry.name.startswith(OURS) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    uv = folder / "bin" / "uv"
    uv.write_text(UV.format(python=sys.executable, inside=str(inside)))
    uv.chmod(0o755)
    return folder / "bin"


def programs_of(image: str, folder: Path) -> dict[str, str]:
    """The variables by which a container of an image finds its programs: the stock one is made, others are here."""
    if image == UV_IMAGE:
        return {"PATH": f"{make_stock_image(folder)}:{os.defpath}", "OMP_NUM_THREADS": "1"}
    # As in its image: what is installed may be another checkout's.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(REPOSITORY)}


def build(lines: Sequence[str], folder: Path, programs: Path | None, files: Mapping[str, bytes]) -> Path | str | None:
    """What a Dockerfile's lines make: the folder of an image's programs, None where it isn't the stock one; text: why
    it failed.

    programs   of the image that the lines begin with, if that was built here
    files      of the context that COPY takes from; they go beside the image's programs, and commands are told so
    """
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word == "FROM" and rest.split()[0] == UV_IMAGE:
            programs = make_stock_image(folder)
        elif word == "COPY" and programs is not None:
            for name, data in files.items():
                path = programs.parent / "copied" / name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        elif word == "RUN" and programs is not None:
            if "--torch-backend auto" in rest:
                return "no GPU is there to ask while an image is built"
            for path in (programs.parent / "copied").rglob("*.whl"):
                rest = rest.replace(f"/{path.relative_to(programs.parent / 'copied')}", str(path))
            env = {"PATH": f"{programs}:{os.defpath}"}
            done = subprocess.run(["sh", "-ec", rest], env=env, capture_output=True, text=True)
            if done.returncode:
                return f"{rest}: {done.stdout[-300:]} {done.stderr[-300:]}"
    return programs


PURE = "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def install(
    site: Path, name: str, *modules: str, direct: Mapping[str, object] | None = None, needs: Sequence[str] = ()
) -> Path:
    """Put a distribution of modules that know an ANSWER where installed ones are, as if from a wheel; its dist-info.

    direct   its direct_url.json, of which only an editable one has no modules there; None: it is from an index
    """
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    written = {f"{info.name}/{each}" for each in ("METADATA", "WHEEL", "INSTALLER", "RECORD")}
    for module in modules:
        (site / f"{module}.py").write_text("ANSWER = 42\n")
        written.add(f"{module}.py")
    requirements = "".join(f"Requires-Dist: {each}\n" for each in needs)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requirements}")
    (info / "WHEEL").write_text(PURE)
    (info / "INSTALLER").write_text("pip\n")
    if direct is not None:
        (info / "direct_url.json").write_text(json.dumps(direct))
        written.add(f"{info.name}/direct_url.json")
    (info / "RECORD").write_text("".join(f"{each},,\n" for each in sorted(written)))
    return info


def make_wheel(site: Path, name: str, file: Path) -> None:
    """Make the wheel of a distribution that `install` put there."""
    with zipfile.ZipFile(file, "w") as wheel:
        for path in sorted(each for each in site.rglob(f"{name}*/*") if each.name in ("METADATA", "WHEEL", "RECORD")):
            wheel.write(path, path.relative_to(site))
        wheel.write(site / f"{name}.py", f"{name}.py")


@pytest.fixture
def handmade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a distribution that was installed from a wheel file, of one module."""
    name = f"handmade_{tmp_path.name[-8:]}".replace("-", "_").lower()
    file = tmp_path / f"{name}-1.0-py3-none-any.whl"
    install(tmp_path / "site", name, name, direct={"url": file.as_uri(), "archive_info": {}})
    make_wheel(tmp_path / "site", name, file)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return name
