"""Sixty one-line changes of the code that decides: how many do the quick tests catch?

    python -m tests.mutants                                all of it; also: make test-mutants
    python -m tests.mutants --count 4 tests/losses         four changes, against the tests of one folder
    python -m tests.mutants --seed 1a71b9f0 --room sync    another commit's draw, one room of it

Each room gives the same number. The seed is the tested commit's first 8 hex digits. Drawn are, inside functions:
comparisons, arithmetic, `and` and `or`, `not`, numbers and truth values, returned values, and statements that are left
out; nothing in strings, messages of errors, logging, docstrings, annotations and defaults. All changes are compiled
into the modules as they are imported, each behind a question that is answered yes in one forked process alone. A first
run of the quick tests notes which of them ask it. The exit code is 0 whatever was caught.
"""

import argparse
import ast
import builtins
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"sync": ("sync/core", "sync"), "losses": ("losses",), "traces": ("traces",), "executors": ("executors",)}
"""Of a room's folders the first that there is."""
QUICK = "not real and not gpu and not network and not vllm and not long"
LEAST_TIME_S, TIMES = 60.0, 20
"""A change whose tests take longer than this, and than so often their own time, hangs and is caught."""

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
LOGGERS = {"logger", "log", "logging", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """A change: what stands in a file's line, and what would stand there."""

    file: str
    node: ast.AST
    changed: ast.AST | None
    """None: the statement is left out."""

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)

    def __str__(self) -> str:
        to = ast.unparse(self.changed) if self.changed else "nothing"
        return f"{self.file}:{self.line}: {ast.unparse(self.node)[:80]} -> {to[:80]}".replace("\n", " ")


def is_text(node: ast.AST) -> bool:
    """Whether an expression is a string, as far as can be seen."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def change(node: ast.AST) -> ast.AST | None:
    """The change of an expression or of a return, None if there is none."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare() if type(new.ops[0]) in COMPARED:
            new.ops[0] = COMPARED[type(new.ops[0])]()
        case ast.BinOp() if type(new.op) in CALCULATED:
            new.op = CALCULATED[type(new.op)]()
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value = node.value + 1  # pyright: ignore[reportAttributeAccessIssue]
        case ast.Return() if new.value is not None and ast.unparse(new.value) != "None":
            new.value = ast.Constant(None)
        case _:
            return None
    return new


def can_go(node: ast.AST) -> bool:
    """Whether a statement can be left out and leave names as they are."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break)


def says(node: ast.AST) -> bool:
    """Whether a statement is logging."""
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    while isinstance(called, ast.Attribute):
        called = called.value
    return isinstance(called, ast.Name) and called.id.strip("_") in LOGGERS


def changes(file: str, node: ast.AST, inside: bool = False) -> Iterator[Mutant]:
    """Every change below a node; `inside` a function."""
    if is_text(node) or says(node) or isinstance(node, ast.pattern):
        return
    if inside and isinstance(node, ast.stmt | ast.expr) and node.lineno == node.end_lineno:
        changed = change(node)
        if changed is not None or can_go(node):
            yield Mutant(file, node, changed)
    if isinstance(node, ast.Raise | ast.Assert):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children: Sequence[ast.AST] = node.body
    elif isinstance(node, ast.Lambda):
        children = [node.body]
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    else:
        children = list(ast.iter_child_nodes(node))
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
        inside and not isinstance(node, ast.ClassDef)
    )
    for child in children:
        yield from changes(file, child, inside)


def draw(root: Path, seed: int, count: int, rooms: Sequence[str]) -> tuple[list[Mutant], dict[str, ast.Module]]:
    """`count` changes, as many of each room, at most one a line; and the trees that they are in, by file."""
    trees: dict[str, ast.Module] = {}
    drawn: list[Mutant] = []
    for place, room in enumerate(rooms):
        folder = next(path for name in ROOMS[room] if (path := root / "composer_prime" / name).is_dir())
        found: dict[tuple[str, int], list[Mutant]] = {}
        for path in sorted(folder.rglob("*.py")):
            file = str(path.relative_to(root))
            trees[file] = ast.parse(path.read_text(encoding="utf-8"))
            for mutant in changes(file, trees[file]):
                found.setdefault((file, mutant.line), []).append(mutant)
        picked = random.Random(f"{seed} {room}")
        share = count // len(rooms) + (place < count % len(rooms))
        drawn += [picked.choice(found[line]) for line in picked.sample(sorted(found), share)]
    return drawn, trees


class Compiled(ast.NodeTransformer):
    """A module's tree with each drawn change behind the question whether it is on."""

    def __init__(self, drawn: list[Mutant]) -> None:
        self._numbers = {id(mutant.node): number for number, mutant in enumerate(drawn)}
        self._drawn = drawn

    def visit(self, node: ast.AST) -> ast.AST:
        number = self._numbers.get(id(node))
        self.generic_visit(node)
        if number is None:
            return node
        asked = ast.Call(ast.Name("__mutant__", ast.Load()), [ast.Constant(number)], [])
        changed = copy.deepcopy(self._drawn[number].changed)
        if isinstance(node, ast.expr):
            assert isinstance(changed, ast.expr)
            new: ast.AST = ast.IfExp(asked, changed, node)
        else:
            assert isinstance(node, ast.stmt) and not isinstance(changed, ast.expr)
            new = ast.If(asked, [changed if isinstance(changed, ast.stmt) else ast.Pass()], [node])
        return ast.fix_missing_locations(ast.copy_location(new, node))


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from a tree, and leaves no .pyc of it."""

    def __init__(self, name: str, path: str, tree: ast.Module) -> None:
        super().__init__(name, path)
        self._tree = tree

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._tree, self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that have changes."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self._trees = trees

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for end in (".py", "/__init__.py"):
            file = fullname.replace(".", "/") + end
            if file in self._trees:
                loader = Loader(fullname, str(ROOT / file), self._trees[file])
                return importlib.util.spec_from_file_location(fullname, ROOT / file, loader=loader)
        return None


class Trial:
    """A pytest plugin: once the tests are collected, runs them as they are, then each change's with the change on."""

    def __init__(self, drawn: list[Mutant], jobs: int, say: Callable[[str], object]) -> None:
        self._drawn, self._jobs, self._say = drawn, jobs, say
        self.on = -1
        self.test, self.failed = "", False
        self.asked: dict[int, set[str]] = {}
        self.caught: dict[int, str] = {}
        builtins.__dict__["__mutant__"] = self.is_on

    def is_on(self, number: int) -> bool:
        self.asked.setdefault(number, set()).add(self.test)
        return number == self.on

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._say(f"{len(session.items)} quick tests, as they are")
        shards = [session.items[place :: self._jobs] for place in range(self._jobs)]
        lines = list(self._forked([lambda shard=shard: self._notes(shard) for shard in shards], None))
        seconds: dict[str, float] = {}
        covering: dict[int, list[str]] = {}
        for line in "".join(text for _, text in lines).splitlines():
            test, took, numbers = line.split("\t")
            if took == "failed":
                self._say(f"fails as it is, left out: {test}")
                continue
            seconds[test] = float(took)
            for number in numbers.split():
                covering.setdefault(int(number), []).append(test)
        tests = {item.nodeid: item for item in session.items}
        covered = sorted(covering, key=lambda number: sum(seconds[test] for test in covering[number]))
        limit_s = max([LEAST_TIME_S, *(TIMES * sum(seconds[test] for test in covering[number]) for number in covered)])
        acts = [
            lambda number=number: self._first_failure(number, [tests[test] for test in covering[number]])
            for number in covered
        ]
        for place, text in self._forked(acts, limit_s):
            number = covered[place]
            if text:
                self.caught[number] = text
            self._say(f"{'caught  ' if text else 'SURVIVES'} {self._drawn[number]}  ({text or len(covering[number])})")
        for number, mutant in enumerate(self._drawn):
            if number not in covering:
                self._say(f"SURVIVES {mutant}  (no quick test comes here)")
        return True

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> bool:
        """Whether a test fails."""
        self.test, self.failed = item.nodeid, False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return self.failed

    def _notes(self, items: list[pytest.Item]) -> str:
        """Of each test its id, its seconds or "failed", and the changes that it comes to."""
        said = []
        for item, following in zip(items, [*items[1:], None], strict=True):
            begun = time.monotonic()
            failed = self._run(item, following)
            took = "failed" if failed else f"{time.monotonic() - begun:.3f}"
            numbers = " ".join(str(number) for number, tests in sorted(self.asked.items()) if item.nodeid in tests)
            said.append(f"{item.nodeid.encode('unicode_escape').decode()}\t{took}\t{numbers}\n")
        return "".join(said)

    def _first_failure(self, number: int, items: list[pytest.Item]) -> str:
        self.on = number
        following = [*items[1:], None]
        return next((item.nodeid for item, after in zip(items, following, strict=True) if self._run(item, after)), "")

    def _forked(self, acts: list[Callable[[], str]], limit_s: float | None) -> Iterator[tuple[int, str]]:
        """What each act returns, with its place, as they end; each runs in a fork of this process, with a folder."""
        waiting = list(enumerate(acts))
        running: dict[int, tuple[int, tempfile.TemporaryDirectory[str], float]] = {}
        while waiting or running:
            while waiting and len(running) < self._jobs:
                place, act = waiting.pop(0)
                folder = tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True)
                running[_fork(act, Path(folder.name))] = (place, folder, time.monotonic())
            for child, (place, folder, begun) in list(running.items()):
                late = limit_s is not None and time.monotonic() - begun > limit_s
                if late:
                    os.kill(child, 9)
                ended, status = os.waitpid(child, 0 if late else os.WNOHANG)
                if ended:
                    del running[child]
                    said = Path(folder.name, "said")
                    text = said.read_text() if status == 0 else "hangs" if late else f"ends with {status}"
                    folder.cleanup()
                    yield place, text
            time.sleep(0.02)


def _fork(act: Callable[[], str], folder: Path) -> int:
    """The id of a child that writes what `act` returns into the folder, and nothing to the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for end in (0, 1, 2):
            os.dup2(null, end)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
        (folder / "said").write_text(act())
        status = 0
    finally:
        os._exit(status)


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tests", nargs="*", help="folders and files of tests; none: all")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", default=commit()[:8], help="hex digits; default: the first 8 of this commit")
    parser.add_argument("--room", nargs="*", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    terminal = os.fdopen(os.dup(1), "w", buffering=1)
    drawn, trees = draw(ROOT, int(given.seed, 16), given.count, given.room)
    compiled = {file: Compiled(drawn).visit(tree) for file, tree in trees.items() if file in {m.file for m in drawn}}
    sys.meta_path.insert(0, Finder({file: tree for file, tree in compiled.items() if isinstance(tree, ast.Module)}))
    trial = Trial(drawn, given.jobs, lambda text: print(text, file=terminal))
    options = ["-q", "-q", "--quick", "-m", QUICK, "--capture=sys", "--hypothesis-seed=0", "-p", "no:cacheprovider"]
    code = pytest.main([*options, "-p", "no:xdist", *given.tests], plugins=[trial])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"the tests could not be collected: pytest ended with {code}")
    print(f"seed {given.seed}: {len(trial.caught)} of {len(drawn)} changes caught", file=terminal)


if __name__ == "__main__":
    main()
