"""The package's module graph, read from its source without importing it: who imports whom, and when."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "composer_prime"


@dataclass(frozen=True)
class Import:
    """One import of a module by another. `lazy`: inside a function; `typing`: only for the type checker."""

    importer: str
    imported: str
    line: int
    lazy: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def source_files(*folders: str) -> list[Path]:
    """The Python files under folders of the repository, in order."""
    return sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))


@cache
def modules() -> dict[str, Path]:
    """The package's modules by dotted name; a package stands for its `__init__`."""
    named = {}
    for path in source_files(PACKAGE):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports() -> tuple[Import, ...]:
    """Every import in the package."""
    return tuple(found for module, path in modules().items() for found in imports_of(module, parse(path)))


def imports_of(module: str, tree: ast.AST, lazy: bool = False, typing: bool = False) -> Iterator[Import]:
    """The imports below a node of a module's source."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in _imported_names(module, node):
                yield Import(module, name, node.lineno, lazy, typing)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imports_of(module, ast.Module(node.body, []), lazy, True)
            yield from imports_of(module, ast.Module(node.orelse, []), lazy, typing)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(module, node, lazy or inside, typing)


def _imported_names(module: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Modules that a statement imports: `from a import b` is a.b where that is one of our modules, else a."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    origin = node.module or ""
    if node.level:
        parts = module.split(".")
        is_package = modules()[module].name == "__init__.py"
        base = parts[: len(parts) - node.level + is_package]
        origin = ".".join([*base, *([origin] if origin else [])])
    for alias in node.names:
        inner = f"{origin}.{alias.name}"
        yield inner if inner in modules() else origin


def room(module: str) -> str:
    """The room a module of the package is in: composer_prime.store.keys is in store; the package itself is ""."""
    return module.split(".")[1] if "." in module else ""


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components), and nodes with a self-loop."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for successor in sorted(graph.get(node, ())):
            if successor not in order:
                visit(successor)
                low[node] = min(low[node], low[successor])
            elif successor in stack:
                low[node] = min(low[node], order[successor])
        if low[node] == order[node]:
            start = stack.index(node)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1 or node in graph.get(node, ()):
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


COUNTING = f"""if True:
    import sys
    from {PACKAGE}.cli.main import main
    try:
        main()
    finally:
        print(*sys.modules, file=sys.stderr)
"""


def modules_loaded(*arguments: str) -> tuple[set[str], str]:
    """Run our command in the repository; the modules that it loads, which is what its start takes, and its output."""
    command = [sys.executable, "-c", COUNTING, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split()), done.stdout
