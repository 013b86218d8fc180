"""What stands for a stock image with Python and uv: a fresh environment that has the packages of an index, and none of
ours.

The index's are links to those of this environment, so that pip finds them installed and asks no index. `uv` is pip.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from composer_prime.executors.installing import UV_IMAGE

OURS = ("composer_prime", "reverse_letters", "sort_letters", "tool_letters", "_editable", "__editable__")

UV = """\
#!{python}
import subprocess, sys
words = iter(sys.argv[1:])
assert [next(words), next(words)] == ["pip", "install"]
kept = []
for word in words:
    if word == "--torch-backend":
        assert next(words) in ("cpu", "auto")
    elif word != "--system":
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


def build(lines: Sequence[str], folder: Path, programs: Path | None, files: Mapping[str, bytes]) -> Path | str | None:
    """What a Dockerfile's lines make: the folder of an image's programs, None where it isn't the stock one; text: why
    it failed.

    programs   of the image that the lines begin with, if that was built here
    files      of the context that COPY takes from; they go below the temporary folder alone
    """
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word == "FROM" and rest.split()[0] == UV_IMAGE:
            programs = make_stock_image(folder)
        elif word == "COPY" and programs is not None:
            for name, data in files.items():
                path = Path("/", name)
                assert path.is_relative_to(tempfile.gettempdir()), path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        elif word == "RUN" and programs is not None:
            if "--torch-backend auto" in rest:
                return "no GPU is there to ask while an image is built"
            env = {"PATH": f"{programs}:{os.defpath}"}
            done = subprocess.run(["sh", "-ec", rest], env=env, capture_output=True, text=True)
            if done.returncode:
                return f"{rest}: {done.stdout[-300:]} {done.stderr[-300:]}"
    return programs


@pytest.fixture
def handmade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a distribution that was installed from a wheel file, of one module."""
    site, name = tmp_path / "site", f"handmade_{tmp_path.name[-8:]}".replace("-", "_").lower()
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text("ANSWER = 42\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///gone/it-1.0.whl", "archive_info": {}}))
    files = [
        f"{name}.py",
        *(f"{info.name}/{each}" for each in ("METADATA", "WHEEL", "INSTALLER", "direct_url.json", "RECORD")),
    ]
    (info / "RECORD").write_text("".join(f"{each},,\n" for each in files))
    monkeypatch.syspath_prepend(str(site))
    return name
