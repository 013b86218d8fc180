"""Sizes and shapes of a Python tree, one number a line.

    python -m tests.size PACKAGE_DIR [--tests DIR] [--docs DIR_OR_FILE ...] [--json]

Counts: *.py files below PACKAGE_DIR. Public names: functions, classes and assigned names at a module's top level that
don't begin with an underscore. Comments: comment tokens. Openings: docstring sentences that begin with Who, What or
That. Private reach: test functions that read or patch an attribute of somebody else that begins with one underscore,
or import one. Docs: sentences of more than three words outside code, tables and headings.
"""

import argparse
import ast
import io
import json
import re
import statistics
import tokenize
from collections import Counter
from pathlib import Path

OWN = {"self", "cls", "os", "sys", "super"}


def trees(root: Path):
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(errors="replace")
        yield path, text, ast.parse(text)


def comments(text: str) -> int:
    try:
        return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return 0


def public(tree: ast.Module) -> int:
    count = 0
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            count += not node.name.startswith("_")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            count += sum(isinstance(t, ast.Name) and not t.id.startswith("_") for t in targets)
    return count


def sentences(text: str) -> list[str]:
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = "\n".join(line for line in text.split("\n") if not line.strip().startswith(("|", "#", "    ")))
    found = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*] ", text)
    return [" ".join(one.split()) for one in found if len(one.split()) > 3]


def openings(tree: ast.Module) -> int:
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for one in re.split(r"(?<=[.!?:;])\s+|\n\s*\n", ast.get_docstring(node) or ""):
                count += len(one.split()) >= 3 and bool(re.match(r"(Who|What|That)\b", one.strip()))
    return count


def reaches(node: ast.AST, package: str) -> bool:
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in OWN
        return node.attr.startswith("_") and not node.attr.startswith("__") and not own
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
        return any(alias.name.startswith("_") for alias in node.names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("setattr", "delattr"):
        words = [a.value.split(".")[-1] for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        return any(w.startswith("_") and not w.startswith("__") for w in words)
    return False


def measure(package: Path, tests: Path | None, docs: list[Path]) -> dict[str, float]:
    found = Counter[str]()
    functions, classes, names, folders = [], [], Counter[str](), Counter[Path]()
    for path, text, tree in trees(package):
        found.update(files=1, lines=len(text.splitlines()), comments=comments(text), public=public(tree))
        found.update(openings=openings(tree))
        folders[path.parent] += 1
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.append((node.end_lineno or 0) - node.lineno + 1)
            elif isinstance(node, ast.ClassDef):
                classes.append((node.end_lineno or 0) - node.lineno + 1)
        names.update({n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and not n.name.startswith("_")})
    result = {
        "files": found["files"],
        "lines": found["lines"],
        "fullest folder": max(folders.values(), default=0),
        "longest function": max(functions, default=0),
        "median function": statistics.median(functions) if functions else 0,
        "functions over 60 lines": sum(n > 60 for n in functions),
        "classes over 250 lines": sum(n > 250 for n in classes),
        "public class names in two files or more": sum(n > 1 for n in names.values()),
        "public names a thousand lines": round(1000 * found["public"] / max(1, found["lines"]), 1),
        "comments a hundred lines": round(100 * found["comments"] / max(1, found["lines"]), 2),
        "docstring sentences that open with Who, What, That": found["openings"],
    }
    if tests is not None:
        lines = bodies = private = cases = 0
        for path, text, tree in trees(tests):
            if "bench" in path.relative_to(tests).parts:
                continue
            lines += len(text.splitlines())
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                    cases += 1
                    bodies += (node.end_lineno or 0) - node.lineno + 1
                    private += any(reaches(one, package.name) for one in ast.walk(node))
        result |= {
            "lines of tests without tests/bench": lines,
            "test functions": cases,
            "share of test lines in test bodies, %": round(100 * bodies / max(1, lines)),
            "test functions that reach into private names": private,
        }
    if docs:
        pages = [p for one in docs for p in ([one] if one.is_file() else sorted(one.rglob("*.md")))]
        texts = [p.read_text(errors="replace") for p in pages]
        found_sentences = [s for text in texts for s in sentences(text)]
        long = sum(len(s.split()) > 30 for s in found_sentences)
        result |= {
            "words of docs": sum(len(text.split()) for text in texts),
            "docs sentences over 30 words, %": round(100 * long / max(1, len(found_sentences)), 1),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--tests", type=Path)
    parser.add_argument("--docs", type=Path, nargs="*", default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = measure(given.package, given.tests, given.docs)
    print(json.dumps(result) if given.json else "\n".join(f"{value:>10}  {name}" for name, value in result.items()))


if __name__ == "__main__":
    main()
