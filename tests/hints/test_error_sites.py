"""Which tool answers are errors, and to which turn an error belongs."""

import json

import pytest

from composer_prime.hints.error_sites import LINE_CHARS, error_sites, find_error
from tests.replay.traces import node

TRACEBACK = "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n    main()\nKeyError: 'name'\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TRACEBACK, ("traceback", "KeyError: 'name'")),
        (f"running\n{TRACEBACK}", ("traceback", "KeyError: 'name'")),
        (
            "  + Exception Group Traceback (most recent call last):\n  | ValueError: no",
            ("traceback", "| ValueError: no"),
        ),
        ("ls: no such file\nexit code: 2", ("exit_code", "exit code: 2")),
        ("Process exited with code 127", ("exit_code", "Process exited with code 127")),
        ("Command failed with exit status 1", ("exit_code", "Command failed with exit status 1")),
        ("returncode=-9", ("exit_code", "returncode=-9")),
        ("Error: file not found", ("error", "Error: file not found")),
        ("ValueError: must be positive", ("error", "ValueError: must be positive")),
        ("bash: frobnicate: command not found", ("error", "bash: frobnicate: command not found")),
        ("fatal: not a git repository", ("error", "fatal: not a git repository")),
        (json.dumps({"exit_code": 1, "stderr": "warning\nboom\n"}), ("exit_code", "boom")),
        (json.dumps({"returncode": 3}), ("exit_code", "exit code 3")),
        (json.dumps({"is_error": True, "message": "denied"}), ("error", "denied")),
        (json.dumps({"error": "timeout"}), ("error", "timeout")),
        (json.dumps({"status": "error"}), ("error", "error")),
        ("", None),
        ("done\nexit code: 0", None),
        ("3 errors were repaired", None),
        ("the log has no Error: line at its start", None),
        (json.dumps({"exit_code": 0, "stderr": "", "error": None}), None),
        (json.dumps(["error"]), None),
        (json.dumps({"error": ""}), None),
    ],
)
def test_a_tool_answer_is_an_error_or_it_is_not(text: str, found: tuple[str, str] | None) -> None:
    assert find_error(text) == found


def test_a_long_line_is_quoted_in_part() -> None:
    assert find_error("Error: " + "x" * 1000) == ("error", ("Error: " + "x" * 1000)[:LINE_CHARS])


def test_an_error_belongs_to_the_sampled_turn_right_after_it() -> None:
    nodes = [
        node(None, "user", [1], content="Traceback (most recent call last):\nKeyError: 1"),
        node(0, "assistant", [2], num_sampled=1, content="Error: I think"),
        node(1, "tool", [3], content="Error: first", name="python"),
        node(2, "tool", [4], content="fine"),
        node(3, "assistant", [5, 6], num_sampled=1),
        node(4, "tool", [7], content="fine again"),
        node(5, "assistant", [8], num_sampled=1),
        node(6, "tool", [9], content="Error: the last word"),
    ]
    (site,) = error_sites(nodes)
    assert (site.tool, site.turn, site.kind, site.line, site.tool_name) == (2, 4, "error", "Error: first", "python")


def test_of_several_errors_before_a_turn_the_last_counts_and_unsampled_turns_have_none() -> None:
    nodes = [
        node(None, "user", [1]),
        node(0, "assistant", [2]),
        node(1, "tool", [3], content="Error: one"),
        node(2, "tool", [4], content=[{"type": "text", "text": "Error: two"}]),  # pyright: ignore[reportArgumentType]
        node(3, "assistant", [5], num_sampled=1),
        node(3, "assistant", [6]),
    ]
    assert [(site.tool, site.turn, site.line) for site in error_sites(nodes)] == [(3, 4, "Error: two")]
