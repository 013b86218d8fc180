"""Runs a module with only some distributions to import: `python -m tests.sites.prime_rl.only_locked FILE MODULE`.

FILE names them, one a line. What no distribution brings (the standard library, a checkout) is imported as ever.
"""

import importlib.metadata
import re
import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class OnlyLocked:
    """Finds what Python's own finder of installed packages does, but none whose distributions are all unnamed."""

    find_distributions = staticmethod(PathFinder.find_distributions)

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._distributions = importlib.metadata.packages_distributions()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        brought_by = self._distributions.get(fullname.partition(".")[0], ())
        if brought_by and self._names.isdisjoint(re.sub(r"[-_.]+", "-", name).lower() for name in brought_by):
            return None
        return PathFinder.find_spec(fullname, path, target)


if __name__ == "__main__":
    names = Path(sys.argv[1]).read_text().split()
    sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyLocked([*names, "composer-prime"])
    sys.argv[:2] = []
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
