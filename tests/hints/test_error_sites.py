"""To which call an error belongs."""

import pytest

from composer_prime.hints.error_sites import error_sites
from tests.hints.test_answers import TRACEBACK
from tests.traces.turns import node


def calls(*ids: str) -> list[dict[str, str]]:
    return [{"id": one, "name": f"tool_{one}", "arguments": "{}"} for one in ids]


def test_an_error_belongs_to_the_sampled_turn_whose_call_it_answers_also_where_the_rollout_ends() -> None:
    nodes = [
        node(None, "user", [1], content=TRACEBACK),
        node(0, "assistant", [2], num_sampled=1, content="Error: I think", tool_calls=calls("a", "b", "c")),
        node(1, "tool", [3], content="fine", tool_call_id="a"),
        node(2, "tool", [4], content="Error: first", tool_call_id="b"),
        node(3, "tool", [5], content="Error: second", tool_call_id="c", name="python"),
        node(4, "assistant", [6, 7], num_sampled=1, tool_calls=calls("d")),
        node(5, "tool", [8], content="fine again", tool_call_id="d"),
        node(6, "assistant", [9], num_sampled=1, tool_calls=calls("e")),
        node(7, "tool", [], content=[{"type": "text", "text": "Unknown tool: grepp"}], tool_call_id="e"),  # pyright: ignore[reportArgumentType]
    ]
    found = [(site.turn, site.answer, site.kind, site.line, site.tool_name) for site in error_sites(nodes)]
    assert found == [
        (1, 3, "error", "Error: first", "tool_b"),
        (7, 8, "unknown_tool", "Unknown tool: grepp", "tool_e"),
    ]


def test_a_turn_that_nobody_sampled_has_no_error_to_be_taught() -> None:
    nodes = [
        node(None, "user", [1]),
        node(0, "assistant", [2], tool_calls=calls("a")),
        node(1, "tool", [3], content="Error: one", tool_call_id="a"),
        node(2, "assistant", [5], num_sampled=1),
    ]
    assert error_sites(nodes) == []


@pytest.mark.parametrize(
    ("content", "kinds"),
    [
        ("<returncode>1</returncode>\n<output>\nls: cannot access 'x'\n</output>", ["exit_code"]),
        ("<returncode>0</returncode>\n<output>\nfine\n</output>", []),
        ("New Terminal Output:\n\nroot@box:/app# foo\nbash: foo: command not found", ["error"]),
        ("Observed result of command executed by user:\nbash: foo: command not found", []),
        ("OBSERVATION:\nUnknown tool: grepp", ["unknown_tool"]),
        ("Error: that is what my own program says. What does it mean?", []),
        (TRACEBACK, []),
    ],
)
def test_of_a_users_messages_only_a_tools_output_shows_an_error(content: str, kinds: list[str]) -> None:
    nodes = [
        node(None, "user", [1], content=content),
        node(0, "assistant", [2], num_sampled=1),
        node(1, "user", [3], content=content),
    ]
    sites = error_sites(nodes)
    assert [site.kind for site in sites] == kinds and all(site.turn == 1 for site in sites)


def test_an_answer_below_a_copy_of_its_turn_belongs_to_the_turn_that_was_sampled() -> None:
    nodes = [
        node(None, "user", [1]),
        node(0, "assistant", [2], num_sampled=1, content="<think>", tool_calls=calls("a")),
        node(0, "assistant", [3], tool_calls=calls("a")),  # rendered anew, without its thoughts
        node(2, "tool", [4], content="Error: one", tool_call_id="a"),
        node(3, "assistant", [5], num_sampled=1, content="ls"),
        node(3, "assistant", [6], content="ls"),
        node(5, "user", [7], content="<returncode>2</returncode>\n<output>\nls: x\n</output>"),
    ]
    assert [(site.turn, site.answer) for site in error_sites(nodes)] == [(1, 3), (4, 6)]
