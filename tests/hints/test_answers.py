"""Which answers are errors, of which kind, and in which line; and that no more is made of other text."""

import json

import pytest

from composer_prime.hints.answers import LINE_CHARS, find_error, find_hint
from tests.architecture import REPOSITORY

TRACEBACK = "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n    main()\nKeyError: 'name'\n"

KNOWN = [
    # Of the notes on what a detector must know: pytest, tool routers, shells.
    ("FAILED test_a.py::test_x - AssertionError", "tests", None),
    ("2 failed, 3 passed in 0.1s", "tests", None),
    ("Tool 'grepp' not found. Available: grep, ls", "unknown_tool", None),
    ("No such file or directory: x.py", "error", None),
    ("Invalid JSON in tool arguments", "bad_arguments", None),
    ("SyntaxError: invalid syntax", "error", None),
    (
        "<returncode>1</returncode>\n<output>\nls: cannot access 'x.py': No such file or directory\n</output>",
        "exit_code",
        "ls: cannot access 'x.py': No such file or directory",
    ),
    ("Command timed out after 30s", "timeout", None),
    ("Unknown tool: grepp", "unknown_tool", None),
    # LangGraph's tool node.
    ("Error: nope is not a valid tool, try one of [get_order_status, issue_refund].", "unknown_tool", None),
    # OpenHands: its editor, its shell, its linter (which SWE-agent has too).
    ("No replacement was performed, old_str `x = None,` did not appear verbatim in /a.ipynb.", "bad_arguments", None),
    ("cat: x\n[Command finished with exit code 1]", "exit_code", "cat: x"),
    (
        "OBSERVATION:\n[Your proposed edit has introduced new syntax error(s). Please understand the errors and retry "
        "your edit command.]\nERRORS:\n- E999 IndentationError: unexpected indent",
        "error",
        "[Your proposed edit has introduced new syntax error(s). Please understand the errors and retry your edit "
        "command.]",
    ),
    # Claude Code.
    (
        "<tool_use_error>String to replace not found in file.\nString:     tests = [</tool_use_error>",
        "error",
        "<tool_use_error>String to replace not found in file.",
    ),
    (
        "Exit code 127\n/usr/bin/bash: line 1: Get-ChildItem: command not found",
        "exit_code",
        "/usr/bin/bash: line 1: Get-ChildItem: command not found",
    ),
    # Terminus.
    (
        "Previous response had parsing errors:\nERROR: No valid JSON found in response",
        "bad_arguments",
        "ERROR: No valid JSON found in response",
    ),
    # smolagents.
    (
        "Call id: call_1\nError:\nError executing tool 'book_flight' with arguments {'origin': 'London'}: "
        "BookingUnavailable: No seats\nNow let's retry: take care not to repeat previous errors!",
        "error",
        "Error executing tool 'book_flight' with arguments {'origin': 'London'}: BookingUnavailable: No seats",
    ),
    # OpenAI's Agents SDK, and servers of the MCP SDK.
    (
        "An error occurred while running the tool. Please try again. Error: $: Invalid JSON input for tool",
        "bad_arguments",
        None,
    ),
    ("Error executing tool get_weather: day is out of range for month", "error", None),
    (
        "Error executing tool add: 1 validation error for addArguments\nb\n  Field required",
        "bad_arguments",
        "Error executing tool add: 1 validation error for addArguments",
    ),
]
"""What agents were told, the kind that it is, and the line that tells it: the first, where none is given."""


@pytest.mark.parametrize(("text", "kind", "line"), KNOWN)
def test_what_agents_are_told_of_errors_is_known(text: str, kind: str, line: str | None) -> None:
    assert find_error(text) == (kind, line or text)


def test_the_docs_list_what_is_known() -> None:
    rows = (REPOSITORY / "docs/teachers.md").read_text().splitlines()
    for text, kind, _ in KNOWN:
        shown = " ⏎ ".join(text.splitlines())[:100]
        assert any(shown in row and row.endswith(f"| `{kind}` |") for row in rows), shown


ERRORS = [
    (TRACEBACK, "traceback", "KeyError: 'name'"),
    (f"running\n{TRACEBACK}", "traceback", "KeyError: 'name'"),
    (f"<returncode>1</returncode>\n<output>\n{TRACEBACK}</output>", "traceback", "KeyError: 'name'"),
    (
        f"{TRACEBACK}[Current working directory: /w]\n[Command finished with exit code 1]",
        "traceback",
        "KeyError: 'name'",
    ),
    ("  + Exception Group Traceback (most recent call last):\n  | ValueError: no", "traceback", "| ValueError: no"),
    ("ls: no such file\nexit code: 2", "exit_code", "ls: no such file"),
    ("Process exited with code 127", "exit_code", "Process exited with code 127"),
    ("Command failed with exit status 1", "exit_code", "Command failed with exit status 1"),
    ("returncode=-9", "exit_code", "returncode=-9"),
    (
        "Exit code: 127\nWall time: 0.1 s\nOutput:\nbash: x: command not found",
        "exit_code",
        "bash: x: command not found",
    ),
    ("EXECUTION RESULT of [execute_bash]:\nUnknown tool: grepp", "unknown_tool", "Unknown tool: grepp"),
    (
        "New Terminal Output:\n\nroot@box:/app# foo\nbash: foo: command not found",
        "error",
        "bash: foo: command not found",
    ),
    ("FAILED tests/test_a.py::test_x - Error", "tests", "FAILED tests/test_a.py::test_x - Error"),
    ("2 passed, 1 error in 0.50s", "tests", "2 passed, 1 error in 0.50s"),
    ("\x1b[31mFAILED\x1b[0m tests/a.py::b", "tests", "FAILED tests/a.py::b"),
    ("ok\n--- FAIL: TestX (0.00s)", "tests", "--- FAIL: TestX (0.00s)"),
    ("Tests:       1 failed, 2 passed, 3 total", "tests", "Tests:       1 failed, 2 passed, 3 total"),
    *(
        (line, "error", line)
        for line in (
            "Error: file not found",
            "Error reading file /x",
            "ValueError: must be positive",
            "KeyError 'x'",
            "sqlite3.OperationalError: no such table: t",
            "bash: frobnicate: command not found",
            "fatal: not a git repository",
            "fatal error: x.h: No such file or directory",
            "x.c:1:2: error: expected ';'",
            "error[E0382]: borrow of moved value",
            "ERROR 1064 (42000): You have an error in your SQL syntax",
            "npm ERR! code ENOENT",
            "curl: (6) Could not resolve host: x",
            "The path /x does not exist. Please provide a valid path.",
        )
    ),
    (
        "MCP error -32602: Invalid arguments for tool x",
        "bad_arguments",
        "MCP error -32602: Invalid arguments for tool x",
    ),
    (
        "f() missing 1 required positional argument: 'x'",
        "bad_arguments",
        "f() missing 1 required positional argument: 'x'",
    ),
    (json.dumps({"exit_code": 1, "stderr": "warning\nboom\n"}), "exit_code", "boom"),
    (json.dumps({"error": "", "stderr": "boom", "exit_code": 1}), "exit_code", "boom"),
    (json.dumps({"returncode": 3}), "exit_code", "exit code 3"),
    (json.dumps({"is_error": True, "message": "denied"}), "error", "denied"),
    (json.dumps({"isError": True, "content": [{"type": "text", "text": "denied"}]}), "error", "denied"),
    (json.dumps({"error": {"message": "n < 0"}}), "error", "n < 0"),
    (json.dumps({"error": "timeout"}), "error", "timeout"),
    (json.dumps({"status": "error"}), "error", "error"),
    (json.dumps({"success": False}), "error", "error"),
    (json.dumps({"error_kind": "bad_arguments", "error": "n < 0"}), "bad_arguments", "n < 0"),
    ('OBSERVATION:\n{"error_kind": "timeout"}', "timeout", "timeout"),
]
NO_ERRORS = [
    "",
    "done\nexit code: 0",
    "<returncode>0</returncode>\n<output>\nFAILED tests/a.py::b\n</output>",
    "<returncode>1</returncode>\n<output>\n</output>",  # a search that found nothing
    "5 passed, 1 xfailed in 0.2s",
    "0 failed, 5 passed in 1s",
    "3 errors were repaired",
    "3 errors fixed in 2 s",
    "Errors: 0",
    "error: null\ntext: fine",
    "ERROR: 0 lines",
    "the log has no Error: line at its start",
    "errors.py  main.py",
    "exception.txt\nmain.py",
    "src/a.py:12: raise ValueError('x')",
    "src/a.py:3:    raise TimeoutError('timed out')",
    "def f():\n    raise ValueError('x')",
    "if done.returncode == 1:\n    pass",
    "# Error: how we say it\nUnknown tool: say so",
    "## Invalid JSON",
    "How to handle 'Unknown tool' errors",
    "ValidationError is raised when a field is missing",
    "abc123 Handle exit code 1 of grep",
    "abc123 Retry when a request timed out",
    "Exit code 1 means that nothing was found\nmore",
    "Connection timed out - Stack Overflow",
    "Function parse_args is not found in utils.py",
    "tool jq not found, using python\n{}",
    "Permission denied errors: how to fix them",
    "README\n\n1. Traceback is a word",
    json.dumps({"exit_code": 0, "stderr": "", "error": None}),
    json.dumps({"error_kind": None}),
    json.dumps(["error"]),
    json.dumps({"error": ""}),
    "[" * 200_000,
    "exit code " + "9" * 5000,
]


@pytest.mark.parametrize(("text", "kind", "line"), ERRORS)
def test_an_error_is_known_by_its_kind_and_quoted(text: str, kind: str, line: str) -> None:
    assert find_error(text) == (kind, line)


@pytest.mark.parametrize("text", NO_ERRORS)
def test_other_text_is_no_error(text: str) -> None:
    assert find_error(text) is None


def test_a_long_line_is_quoted_in_part_and_a_long_answer_looked_at_in_part() -> None:
    assert find_error("Error: " + "x" * 1000) == ("error", ("Error: " + "x" * 1000)[:LINE_CHARS])
    assert find_error("fine\n" * 100_000 + "2 failed in 0.1s") == ("tests", "2 failed in 0.1s")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"error": "locked", "hint": " call unlock first "}', "call unlock first"),
        ('{"error": "locked", "hint": ""}', None),
        ('{"error": "locked", "hint": ["call", "unlock"]}', None),
        ('[{"hint": "call unlock first"}]', None),
        ("hint: call unlock first", None),
        ('{"error": "locked", "hint": "' + "long " * 100 + '"}', ("long " * 100)[:200]),
    ],
)
def test_a_hint_is_what_a_json_object_says_under_that_name_and_nothing_else(text: str, hint: str | None) -> None:
    assert find_hint(text) == hint
