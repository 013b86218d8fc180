"""Words that are on their way out (one thing, one word), and where they still stand.

    python -m tests.words    the names of composer_prime/ that have one, a word a line

A name counts once, wherever it is defined: module, class, function, parameter, attribute or variable. Case, underscores
and a plural's s don't matter: `MasterBytes`, `_masters` and `master_of` all have `master`.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

_OLD = """
courier errand movement master beat pulse heartbeat incarnation roster admitted merger tape journal pin witness refining
coarse entering beginning creating founding returning overtaken superseded jump leap void vouched stated shim launching
supervising entrance examination doctor nursery shelf patience warden wishes heard
"""
WORDS = frozenset(_OLD.split())
"""The new words: syncer, contribution, pseudo-gradient, global weights, lease, epoch, membership, reducer, event log,
retention, offer diagnostics, write-ahead log, learner, bootstrap, recovery, fenced, install snapshot, no-op round,
certified, PayloadClaim, JobRunner, launch/plan, admission, ForkServer, SnapshotCache, Timeouts, VolunteerMonitor."""
_WHOLE = "site_clock capture FragmentStand Closing Place Verdict Standing Stretch Reserve Room Keeper Intent Say Path"
NAMES = frozenset(_WHOLE.split())
"""Whole names that are gone; the words in them may stay."""
IN_DOCS = WORDS - {"beat", "movement", "pin", "void", "doctor", "heard", "creating", "returning", "beginning"}
"""Those that are not plain English or a command's name."""


def words_of(name: str) -> set[str]:
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {part.lower() for part in parts} | {part.lower().removesuffix("s") for part in parts}


def defined(tree: ast.Module) -> set[str]:
    """The names that a module defines, at any depth."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def old_names(package: Path, trees: Iterable[ast.Module]) -> set[str]:
    """The distinct names of a package that have an old word."""
    names = {path.stem for path in package.rglob("*.py")}.union(*(defined(tree) for tree in trees))
    return {name for name in names if name in NAMES or words_of(name) & WORDS}


def old_words(text: str) -> int:
    """How often a page says one."""
    said = re.findall(r"[a-z]+", text.lower())
    return sum(word in IN_DOCS or word.removesuffix("s") in IN_DOCS for word in said)


def main() -> None:
    package = Path(__file__).parents[1] / "composer_prime"
    names = old_names(package, [ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")])
    for word in sorted(WORDS):
        having = sorted(name for name in names if word in words_of(name))
        print(f"{len(having):>5}  {word}: {', '.join(having)}")
    print(f"{len(names & NAMES):>5}  whole names: {', '.join(sorted(names & NAMES))}")


if __name__ == "__main__":
    main()
