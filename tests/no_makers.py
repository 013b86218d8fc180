"""A machine on which the package that makes tiny models isn't installed."""

import os
import sys
from pathlib import Path

import pytest


def hide_makers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and those that it starts find no tiny_policy; writes into the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text('import sys\nsys.modules["tiny_policy"] = None\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    for name in [each for each in sys.modules if each.startswith("tiny_policy.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tiny_policy", None)


def said_of(name: str) -> str:
    """What a person is told who wants the model of that name there."""
    return (
        f"model.name ({name}) is made by a package that isn't installed (there is no module tiny_policy.built_in): "
        "in the clone of composer-prime, pip install ./envs/tiny_policy"
    )
