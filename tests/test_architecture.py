"""Who may import whom, what must stay light, how long a file may be: the rules that keep the rooms apart."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import PACKAGE, REPOSITORY, cycles, imports, modules, modules_loaded, parse, room, source_files

LAYERS = (
    {"cli"},
    {"ablate"},
    {"bench", "volunteers"},
    {"launch"},
    {"watch", "executors", "sites", "integrations", "gateway", "export"},
    {"plan"},
    {"sync", "traces", "hints"},
    {"teachers"},
    {"losses", "outer", "store"},
    {"config", "metrics", "waiting"},
    {"bearer"},
    {"errors"},
    {"visible"},
    {"redaction", "private"},
)
"""From the top down: a module imports its own room, and rooms of lower layers."""

LIGHT_ROOMS = {
    "cli",
    "config",
    "errors",
    "metrics",
    "redaction",
    "private",
    "visible",
    "waiting",
    "store",
    "executors",
    "launch",
    "plan",
    "watch",
    "volunteers",
}
LIGHT_SYNC = "canonical history ledger lifetime members owner protocol reading records roster runtime signatures tape"
LIGHT_MODULES = {f"{PACKAGE}.sync", *(f"{PACKAGE}.sync.{name}" for name in f"{LIGHT_SYNC} terms validity".split())}
LIGHT_MODULES |= {f"{PACKAGE}.gateway.{name}" for name in ("store", "client", "wire", "invitation_keys")}

_KEY_MODULES = ("store.keys", "launch.launch_keys", "gateway.invitation_keys", "integrations.torchft_keys")
KEY_MODULES = {f"{PACKAGE}.{name}" for name in _KEY_MODULES}
KEY_STARTS = ("rounds/", "masters/", "tape/", "probe/", "launches/", "invitations/")
KEY_PARTS = ("manifest.json", "commit.json", "claim.json", "close.json", "/offers/", "/payload/")

HELP_LIMIT = 350
"""Modules that are loaded for help; Python alone takes a hundred."""
FILE_LIMIT = 500
FUNCTION_LIMIT = 80


def layer(name: str) -> int:
    return next(place for place, rooms in enumerate(LAYERS) if name in rooms)


def test_every_room_has_its_place_in_the_layers() -> None:
    assert {room(module) for module in modules()} - {""} <= set().union(*LAYERS)


def test_imports_go_down_only() -> None:
    upward = [
        str(found)
        for found in imports()
        if found.imported.startswith(f"{PACKAGE}.")
        and room(found.importer) not in ("", room(found.imported))
        and layer(room(found.importer)) >= layer(room(found.imported))
    ]
    assert not upward


def test_no_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if not found.typing and found.imported in graph:
            graph[found.importer].add(found.imported)
    assert cycles(graph) == []


def test_a_cycle_would_be_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "d"}, "e": {"d"}}) == [["a", "b", "c"], ["d"]]


def test_prime_rl_is_imported_in_its_own_room_and_lazily_by_losses() -> None:
    strays = [
        str(found)
        for found in imports()
        if found.imported.split(".")[0] == "prime_rl"
        and not found.importer.startswith(f"{PACKAGE}.sites.prime_rl")
        and not (room(found.importer) == "losses" and found.lazy)
    ]
    assert not strays


def test_the_makers_of_tiny_models_are_imported_by_one_function() -> None:
    found = [each for each in imports() if each.imported.split(".")[0] == "tiny_policy"]
    assert [(each.importer, each.lazy) for each in found] == [(f"{PACKAGE}.sites.embedded.model", True)]


def test_environments_do_not_import_us() -> None:
    for path in source_files("envs"):
        # The first is in our wheel: where verifiers finds `sites.prime_rl.pairs_env`. The second is no environment.
        if path.relative_to(REPOSITORY / "envs").parts[0] in ("composer_prime_pairs", "tiny_policy"):
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != PACKAGE, f"{path}:{node.lineno}"
            elif isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != PACKAGE for alias in node.names), f"{path}:{node.lineno}"


def test_the_light_modules_import_no_torch_also_not_through_others() -> None:
    light = [name for name in modules() if room(name) in LIGHT_ROOMS or name in LIGHT_MODULES]
    assert len(light) > 20
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *light], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["bench", "--help"]], ids=" ".join)
def test_help_answers_at_once(arguments: list[str]) -> None:
    loaded, answer = modules_loaded(*arguments)
    assert answer.startswith("Usage:") and len(loaded) < HELP_LIMIT


def test_keys_in_the_bucket_are_spelled_in_one_place() -> None:
    strays = [
        f"{path}:{line} spells {text!r}"
        for name, path in modules().items()
        if name not in KEY_MODULES
        for line, text in spelled_strings(parse(path))
        if text.startswith(KEY_STARTS) or any(part in text for part in KEY_PARTS)
    ]
    assert not strays


def spelled_strings(tree: ast.Module) -> list[tuple[int, str]]:
    """The strings in a module's code with their lines, docstrings left out."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
    return [(node.lineno, node.value) for node in constants if isinstance(node.value, str)]


def test_every_module_says_what_it_is() -> None:
    assert [name for name, path in modules().items() if not ast.get_docstring(parse(path))] == []


def long_functions(path: Path) -> list[str]:
    functions = [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [f"{path}: {name} has {lines} lines" for name, lines in spans if lines > FUNCTION_LIMIT]


def test_files_and_functions_stay_short() -> None:
    files = source_files(PACKAGE, "envs", "tests")
    assert len(files) > 50
    long_files = [str(path) for path in files if len(path.read_text(encoding="utf-8").splitlines()) > FILE_LIMIT]
    assert long_files == []
    assert [line for path in files for line in long_functions(path)] == []
