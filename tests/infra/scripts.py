"""Runs a shell script of infra/ with stand-ins for the programs it calls, which note what they were called with."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

STAND_IN = """#!{python} -S
import json, os, sys
with open({notes!r}, "a") as file:
    names = {variables!r}
    call = {{"program": {name!r}, "arguments": sys.argv[1:], "variables": {{n: os.environ.get(n) for n in names}}}}
    file.write(json.dumps(call) + "\\n")
"""


class Stage:
    """A PATH of stand-ins, and what they noted."""

    def __init__(self, folder: Path, programs: Iterable[str], variables: Iterable[str] = ()) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self._notes = folder / "calls.jsonl"
        for name in programs:
            values = {"python": sys.executable, "notes": str(self._notes), "name": name, "variables": list(variables)}
            (self.bin / name).write_text(STAND_IN.format(**values))
            (self.bin / name).chmod(0o755)
        (self.bin / "python").symlink_to(sys.executable)

    def run(self, script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The script's end; it knows no variables but these."""
        env = {"PATH": f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin", **environment}
        return subprocess.run(
            ["bash", str(script), *arguments], env=env, capture_output=True, text=True, timeout=PATIENCE_S
        )

    def calls(self) -> list[dict[str, Any]]:
        """Every call so far, in order of their notes."""
        return [json.loads(line) for line in self._notes.read_text().splitlines()] if self._notes.exists() else []

    def words(self) -> list[list[str]]:
        """Every call as words."""
        return [[call["program"], *call["arguments"]] for call in self.calls()]


def linter(name: str) -> str | None:
    """A linter on the PATH or beside our Python; None where it isn't installed."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def complaints(command: list[str], env: Mapping[str, str] | None = None) -> str:
    """What a linter says; '' when it is content."""
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE_S)
    return done.stdout + done.stderr if done.returncode else ""
