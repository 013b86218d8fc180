"""The loopback platforms that every executor's tests run over: one line each, imported when a test wants it."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.executors.platforms import LoopbackPlatform

LOOPBACKS: dict[str, tuple[str, Callable[[type, Path], LoopbackPlatform]]] = {
    "local": ("tests.executors.loopback_local.LocalPlatform", lambda kind, folder: kind(folder)),
    "ssh": ("tests.executors.loopback_ssh.SshPlatform", lambda kind, folder: kind(folder)),
    "modal": ("tests.executors.loopback_modal.LoopbackModal", lambda kind, folder: kind(folder)),
    "sky": ("tests.executors.loopback_sky.SkyPlatform", lambda kind, folder: kind(folder)),
    "hf-jobs": ("tests.executors.loopback_hf_jobs.HfJobsPlatform", lambda kind, folder: kind(folder)),
}
"""Platform -> its loopback's class, and how one is made in an empty folder."""

PLATFORM_PARAMS = [pytest.param(name, id=name) for name in LOOPBACKS]


def loopback(name: str, folder: Path) -> LoopbackPlatform:
    """A new, empty loopback of a platform."""
    place, make = LOOPBACKS[name]
    module, _, kind = place.rpartition(".")
    return make(getattr(importlib.import_module(module), kind), folder)


@contextmanager
def reachable(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackPlatform]:
    """A loopback that every process started from here reaches, with our command on its path."""
    with closing(loopback(name, folder)) as opened:
        for variable, value in opened.environment().items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        yield opened
