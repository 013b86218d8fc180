"""What `python -m tests.mutants` changes, what it leaves alone, and that a change is off until it is asked for."""

import ast
import builtins

import pytest

from tests.mutants import Compiled, Mutant, changes


def found(body: str) -> list[Mutant]:
    indented = body.replace("\n", "\n    ")
    return list(changes("file.py", ast.parse(f"def f(a: int = 1, b: int = 2) -> int:\n    {indented}")))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", ["return a < b -> return None", "a < b -> a <= b"]),
        ("if not a and b: b += 1", ["b += 1 -> nothing", "1 -> 2", "not a and b -> not a or b", "not a -> a"]),
        ("raise ValueError(f'{a + b} must be at most {a - 1}')", ["... -> nothing"]),
        ("logger.info('round=%d', a + b)", []),
        ("'''What it is.'''\nc: int = a // b", ["a // b -> a * b"]),
        ("return 'a' + 'b' + a", ["return 'a' + 'b' + a -> return None"]),
        ("a.close()", ["a.close() -> nothing"]),
    ],
)
def test_expressions_and_statements_are_changed_and_messages_are_not(body: str, expected: list[str]) -> None:
    said = [str(mutant).split(": ", 1)[1] for mutant in found(body)]
    assert sorted("... -> nothing" if text.startswith("raise") else text for text in said) == sorted(expected)


def test_defaults_annotations_and_what_is_computed_at_import_stay() -> None:
    assert list(changes("file.py", ast.parse("LIMIT = 3 + 4\nclass C:\n    size: int = 5 + LIMIT"))) == []


def test_each_change_is_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def f(a, b):\n    if a < b or not a:\n        b -= 1\n    return (a == b) + 2\n"
    tree = ast.parse(source)
    drawn = list(changes("file.py", tree))
    module = Compiled(drawn).visit(tree)
    assert isinstance(module, ast.Module)
    names: dict[str, object] = {}
    exec(compile(module, "file.py", "exec"), names)
    on = -1
    monkeypatch.setattr(builtins, "__mutant__", lambda number: number == on, raising=False)

    def answers(function: object) -> list[object]:
        assert callable(function)
        return [function(a, b) for a in range(3) for b in range(3)]

    original: dict[str, object] = {}
    exec(source, original)
    assert answers(names["f"]) == answers(original["f"])
    for on, mutant in enumerate(drawn):  # noqa: B007 (read by the lambda)
        assert answers(names["f"]) != answers(original["f"]), mutant
