"""Sizes and shapes of this repository, one number a line, and the guard that keeps them from growing.

    python -m tests.size               the numbers of this tree, each with its limit from size.toml
    python -m tests.size --tree DIR    those of another checkout
    python -m tests.size --tighten     writes the numbers that got better into size.toml

The wheel is composer_prime/: *.py, and JavaScript, CSS and HTML. Public names: functions, classes and assigned names at
a module's top level that don't begin with an underscore. Comments: comment tokens. Openings: docstring sentences that
begin with Who, What or That. Private reach: test functions that read or patch an attribute of somebody else that begins
with one underscore, or import one. Docs: README.md and docs/; their sentences of more than three words outside code,
tables and headings. Old words: see tests/words.py.
"""

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.words import old_names, old_words

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_name("size.toml")
OWN = {"self", "cls", "os", "sys", "super"}
ASSETS = ("*.js", "*.css", "*.html")
WHO = re.compile(r"(Who|What|That)\b")


@dataclass(frozen=True)
class Source:
    """A Python file, and its nodes in one list."""

    path: Path
    text: str
    tree: ast.Module
    nodes: list[ast.AST]


def sources(folder: Path) -> list[Source]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        found.append(Source(path, text, tree, list(ast.walk(tree))))
    return found


def span(node: ast.AST) -> int:
    return (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1


def comments(text: str) -> int:
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def public(tree: ast.Module) -> int:
    count = 0
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            count += not node.name.startswith("_")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            count += sum(isinstance(each, ast.Name) and not each.id.startswith("_") for each in targets)
    return count


def sentences(text: str) -> list[str]:
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = "\n".join(line for line in text.split("\n") if not line.strip().startswith(("|", "#", "    ")))
    found = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*] ", text)
    return [" ".join(each.split()) for each in found if len(each.split()) > 3]


def openings(nodes: list[ast.AST]) -> int:
    count = 0
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in re.split(r"(?<=[.!?:;])\s+|\n\s*\n", ast.get_docstring(node) or ""):
                count += len(each.split()) >= 3 and bool(WHO.match(each.strip()))
    return count


def reaches(node: ast.AST) -> bool:
    """Whether a node of a test reads, patches or imports what begins with one underscore and isn't its own."""
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in OWN
        return node.attr.startswith("_") and not node.attr.startswith("__") and not own
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("composer_prime"):
        return any(alias.name.startswith("_") for alias in node.names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("setattr", "delattr"):
        texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        words = [text.split(".")[-1] for text in texts]
        return any(word.startswith("_") and not word.startswith("__") for word in words)
    return False


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def wheel_numbers(root: Path) -> dict[str, float]:
    found, folders, classes = Counter[str](), Counter[Path](), Counter[str]()
    functions: list[int] = []
    package = root / "composer_prime"
    files = sources(package)
    assets = [path for kind in ASSETS for path in package.rglob(kind)]
    for each in files:
        folders[each.path.parent] += 1
        found.update(comments=comments(each.text), public=public(each.tree), openings=openings(each.nodes))
        functions += [span(node) for node in each.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        own = [node for node in each.nodes if isinstance(node, ast.ClassDef)]
        found.update(long_classes=sum(span(node) > 250 for node in own))
        classes.update({node.name for node in own if not node.name.startswith("_")})
    num_lines = sum(len(each.text.splitlines()) for each in files) + lines(assets)
    return {
        "lines of the wheel": num_lines,
        "files of the wheel": len(files) + len(assets),
        "fullest folder of the wheel": max(folders.values()),
        "functions over 60 lines": sum(length > 60 for length in functions),
        "classes over 250 lines": found["long_classes"],
        "class names defined twice": sum(count > 1 for count in classes.values()),
        "openings with Who, What, That": found["openings"],
        "names with an old word": len(old_names(package, [each.tree for each in files])),
        "median function, lines": statistics.median(functions),
        "longest function, lines": max(functions),
        "public names a thousand lines": round(1000 * found["public"] / num_lines, 1),
        "comments a hundred lines": round(100 * found["comments"] / num_lines, 2),
    }


def test_numbers(root: Path) -> dict[str, float]:
    tests, bodies, private, count = 0, 0, 0, 0
    bench = root / "tests/bench"
    for each in sources(root / "tests"):
        if each.path.is_relative_to(bench):
            continue
        tests += len(each.text.splitlines())
        for node in each.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                count += 1
                bodies += span(node)
                private += any(reaches(inner) for inner in ast.walk(node))
    return {
        "lines of tests without tests/bench": tests,
        "lines of tests/bench": lines(sorted(bench.rglob("*.py"))),
        "tests that reach into private names": private,
        "test functions": count,
        "share of test lines in test bodies, %": round(100 * bodies / tests),
    }


def other_numbers(root: Path) -> dict[str, float]:
    texts = [path.read_text(encoding="utf-8") for path in (root / "README.md", *sorted((root / "docs").rglob("*.md")))]
    said = [each for text in texts for each in sentences(text)]
    long = sum(len(each.split()) > 30 for each in said)
    return {
        "lines of envs/": lines(sorted((root / "envs").rglob("*.py"))),
        "lines of recipes/": lines(sorted((root / "recipes").rglob("*.toml"))),
        "words of docs": sum(len(text.split()) for text in texts),
        "docs sentences over 30 words": long,
        "old words in docs": sum(old_words(text) for text in texts),
        "docs sentences over 30 words, %": round(100 * long / max(1, len(said)), 1),
    }


def measure(root: Path = ROOT) -> dict[str, float]:
    """Every number of a checkout, by name, in the order in which they are printed."""
    return wheel_numbers(root) | test_numbers(root) | other_numbers(root)


def limits() -> dict[str, float]:
    """The most that each guarded number may be: size.toml's, with what its [[raised]] entries allow for now."""
    read = tomllib.loads(LIMITS.read_text(encoding="utf-8"))
    most = dict(read["at_most"])
    for raise_ in read.get("raised", ()):
        most[raise_["number"]] += raise_["by"]
    return most


def worse(numbers: dict[str, float]) -> list[str]:
    """One line for each number that went the wrong way."""
    return [
        f"{name} ({numbers[name]:g}) must be at most {most:g}: take something away, or raise it in tests/size.toml "
        "by a [[raised]] entry with number, by, issue and until"
        for name, most in limits().items()
        if numbers[name] > most
    ]


def tighten(numbers: dict[str, float]) -> None:
    """Write each number that is below size.toml's into it; the rest of the file stays as it is."""
    text = LIMITS.read_text(encoding="utf-8")
    for name, most in tomllib.loads(text)["at_most"].items():
        if numbers[name] < most:
            text = re.sub(rf'^"{re.escape(name)}" = .*$', f'"{name}" = {numbers[name]:g}', text, flags=re.M)
    LIMITS.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout of this repository")
    parser.add_argument("--tighten", action="store_true", help="write better numbers into size.toml")
    given = parser.parse_args()
    numbers, most = measure(given.tree), limits()
    for name, number in numbers.items():
        print(f"{number:>10g}  {name}" + (f"  (at most {most[name]:g})" if name in most else ""))
    if given.tighten:
        tighten(numbers)
    found = worse(numbers)
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
