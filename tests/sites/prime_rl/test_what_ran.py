"""The table of what ran with each PRIME-RL: tests write it, nothing in it failed, and no test is missing from it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.architecture import REPOSITORY
from tests.sites.prime_rl.what_ran import BEGIN, END, PAGE, Table, claim_of, read, write

ROOMS = ("infra", "losses", "recipes", "sites/prime_rl")


def marked(file: Path) -> list[str]:
    """The tests in the file that are marked `prime_rl`."""
    body = ast.parse(file.read_text()).body
    whole = any(isinstance(node, ast.Assign) and "mark.prime_rl" in ast.unparse(node) for node in body)
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [
        test.name for test in tests if whole or any("mark.prime_rl" in ast.unparse(one) for one in test.decorator_list)
    ]


def test_the_page_has_every_test_that_needs_a_checkout_and_none_that_failed() -> None:
    page = PAGE.read_text()
    table = read(page)
    files = [file for room in ROOMS for file in (REPOSITORY / "tests" / room).rglob("test_*.py")]
    assert table.keys() == {
        claim_of(f"{file.relative_to(REPOSITORY)}::{name}") for file in files for name in marked(file)
    }
    versions = {"v0.8.0", "559b447"}
    for row in table.values():
        assert row.keys() == versions and any("passed" in cell for cell in row.values())
        assert not any(word in cell for cell in row.values() for word in ("failed", "error", "not run"))
    assert write(page, table) == page


def test_a_run_writes_its_versions_column_and_leaves_the_others(tmp_path: Path) -> None:
    had: Table = {
        ("test_it.py", "one and one is two"): {"v1": "1 passed", "abc": "1 failed"},
        ("test_it.py", "gone"): {"abc": "1 passed"},
    }
    page = tmp_path / "page.md"
    page.write_text(write(f"before\n{BEGIN}{END}\nafter\n", had))
    (tmp_path / "conftest.py").write_text(
        f"from pathlib import Path\nfrom tests.sites.prime_rl import what_ran\nwhat_ran.PAGE = Path({str(page)!r})\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2, 3])\n"
        "def test_one_and_one_is_two(n):\n    assert n != 2\n"
        "def test_nothing():\n    pytest.skip()\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.sites.prime_rl.what_ran", "-p", "no:cacheprovider", "."]
    for name in ("", "abc"):
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "PRIME_RL_NAME": name}
        assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode == 1
        if not name:
            assert read(page.read_text()) == {test: {"v1": "not run"} | row for test, row in had.items()}
    assert page.read_text().startswith("before\n") and page.read_text().endswith(f"{END}\nafter\n")
    assert read(page.read_text()) == {
        ("test_it.py", "one and one is two"): {"v1": "1 passed", "abc": "2 passed, 1 failed"},
        ("test_it.py", "nothing"): {"v1": "not run", "abc": "1 skipped"},
    }
