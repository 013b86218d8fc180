"""A laptop that has Python, what PyPI has, and our wheel: nothing of the checkout."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.architecture import REPOSITORY
from tests.executors.stock_image import make_stock_image
from tests.executors.walkthrough import CACHE
from tests.integration.local_runs import started

KEPT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_REGION")
"""The bucket's variables, as `store_uri` sets them."""


def build_wheels(folder: Path) -> Path:
    """Build the wheels of this package, the demo's environment and its model's maker from the checkout into a folder;
    the folder."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    envs = [str(REPOSITORY / "envs" / name) for name in ("reverse_letters", "tiny_policy")]
    subprocess.run([*pip, str(REPOSITORY), *envs], check=True)
    return folder


def install_wheels(folder: Path, wheels: Path, extra: str = "") -> Path:
    """A new environment in a folder, with these wheels and an extra of ours; the folder of its programs."""
    programs = make_stock_image(folder)
    (ours,) = wheels.glob("composer_prime-*.whl")
    others = [str(wheel) for wheel in wheels.glob("*.whl") if wheel != ours]
    named = f"{ours}[{extra}]" if extra else str(ours)
    subprocess.run([str(programs / "uv"), "pip", "install", named, *others], check=True, capture_output=True)
    return programs


class Laptop:
    """Its environment, and a home that is empty."""

    def __init__(self, folder: Path, wheels: Path, extra: str, environment: Mapping[str, str]) -> None:
        programs = install_wheels(folder / "venv", wheels, extra)
        self.home = folder / "home"
        self.home.mkdir()
        bucket = {name: os.environ[name] for name in KEPT if name in os.environ}
        self._env = {"PATH": f"{programs}:{os.defpath}", "XDG_CACHE_HOME": CACHE, "OMP_NUM_THREADS": "1"}
        self._env |= {"HOME": str(self.home), **bucket, **environment}
        (package,) = folder.glob("venv/lib/python*/site-packages/composer_prime")
        assert not package.is_symlink(), "of the wheel"

    @contextmanager
    def running(self, line: str) -> Iterator["subprocess.Popen[bytes]"]:
        """A command line in its home; what that says is `said`."""
        with started(["env", *line.split()], self.home / "log", cwd=self.home, env=self._env) as process:
            yield process

    @property
    def said(self) -> str:
        """By the last command."""
        return (self.home / "log").read_text()
