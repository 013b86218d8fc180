"""A role that is started with its imports undisturbed is otherwise as `python -m` would start it."""

import os
import subprocess
import sys
from pathlib import Path

from composer_prime.sites.embedded import start
from tests.architecture import REPOSITORY

ROLE = """
import gc, sys
from composer_prime.sites.embedded.start import imported
print(__name__, sys.argv[1:], gc.isenabled(), gc.get_freeze_count() > 0)
imported()
print(gc.isenabled(), gc.get_freeze_count() > 0)
sys.exit(3)
"""


def test_collection_waits_until_all_is_imported_and_the_role_is_the_program(tmp_path: Path) -> None:
    (tmp_path / "role.py").write_text(ROLE)
    paths = os.pathsep.join(filter(None, [str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    said = {}
    for way in ([], [start.__name__]):
        command = [sys.executable, "-m", *way, "role", "folder"]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
        assert done.returncode == 3, done.stderr
        said[bool(way)] = done.stdout.splitlines()
    assert said[True] == ["__main__ ['folder'] False False", "True True"]
    assert said[False] == ["__main__ ['folder'] True False", "True False"]
