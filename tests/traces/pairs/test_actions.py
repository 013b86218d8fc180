"""Which messages are the same action: calls by their arguments' meaning, text by its words; and each rule's limits."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.traces.pairs.actions import action_key, same_action
from composer_prime.traces.pairs.arguments import normal_python
from tests.traces.pairs.building import call, calls, says, tool

CWD = "/home/a/p"
TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def same(name: str, one: Any, other: Any, cwd: str | None = None, **properties: Any) -> bool:
    """Whether two calls of a tool with these arguments are the same action."""
    return same_action(calls(call(name, one)), calls(call(name, other)), [tool(name, **properties)], cwd)


def test_key_order_and_whole_numbers_make_no_difference_and_blanks_of_a_text_do() -> None:
    assert same("f", '{"a": 1, "b": [2.0, {"c": "x"}]}', ' {"b":[2,{"c":"x"}],"a":1.0}')
    assert not same("f", {"a": 1}, {"a": 2}) and not same("f", {"a": 1}, {"a": "1"}) and not same("f", {"a": 1}, {})
    assert not same("f", {"a": 1}, {"a": True}) and not same("f", {"a": [1, 2]}, {"a": [2, 1]})
    assert not same("f", {"a": 0.5}, {"a": 0}) and not same("f", {"a": "x"}, {"a": " x"})


def test_what_is_written_counts_to_its_last_newline_and_indentation() -> None:
    for name in ("content", "new_string", "file_text", "patch", "code_edit", "input", "text"):
        assert not same("edit", {"path": "a", name: "x\n"}, {"path": "a", name: "x"})
        assert not same("edit", {"path": "a", name: "    x"}, {"path": "a", name: "x"})
        assert not same("edit", {"path": "a", name: "a//b"}, {"path": "a", name: "a/b"})
        assert not same("edit", {"path": "a", name: '{"a":1}'}, {"path": "a", name: '{"a": 1}'})
    assert not same("write_python", {"path": "a.py", "code": "f(1)"}, {"path": "a.py", "code": "f( 1 )"})


def test_what_a_call_leaves_out_is_its_schemas_default() -> None:
    nested = {"type": "object", "properties": {"depth": {"default": 3}}}
    schemas: dict[str, Any] = {"limit": {"type": "integer", "default": 10}, "how": nested}
    assert same("f", {"how": {}}, {"limit": 10.0, "how": {"depth": 3}}, **schemas)
    assert not same("f", {"how": {}}, {"limit": 11, "how": {}}, **schemas)
    assert same("f", "", {"limit": 10}, **schemas) and not same("f", "", {"limit": 10})
    assert not same("f", "", {"on": True}, on={"default": 1}) and not same("f", {"on": False}, "", on=FLAG)
    required = tool("f", limit={"type": "integer", "default": 10})
    required["function"]["parameters"]["required"] = ["limit"]
    assert not same_action(calls(call("f", {})), calls(call("f", {"limit": 10})), [required])


def test_known_defaults_stand_where_no_schema_states_another() -> None:
    assert same("Bash", {"command": "x"}, {"command": "x", "timeout": 120000}, command=TEXT, timeout=NUMBER)
    assert not same("Bash", {"command": "x"}, {"command": "x", "timeout": 60000}, timeout=NUMBER)
    assert not same("Bash", {"command": "x"}, {"command": "x", "timeout": 120000}, timeout={"default": 5})
    assert same("Glob", {"pattern": "*"}, {"pattern": "*", "path": CWD}, CWD)
    assert not same("Glob", {"pattern": "*"}, {"pattern": "*", "path": f"{CWD}/src"}, CWD)
    assert not same("shot", {}, {"path": CWD}, CWD)


def test_null_is_left_out_where_the_schema_doesnt_make_it_a_value() -> None:
    assert same("f", {"limit": None}, {}, limit=NUMBER)
    assert same("f", {"limit": None}, {"limit": 5}, limit={"type": "integer", "default": 5})
    assert not same("f", {"limit": None}, {"limit": 5}, limit={"type": ["integer", "null"], "default": 5})
    assert not same("f", {"more": None}, {}, limit=NUMBER) and not same("f", {"limit": 0}, {}, limit=NUMBER)


def test_numbers_flags_and_lists_equal_their_texts_where_the_schema_wants_such_a_value() -> None:
    assert same("f", {"n": "5"}, {"n": 5}, n=NUMBER) and same("f", {"n": "true"}, {"n": True}, n=FLAG)
    assert same("f", {"n": '[{"a":1}]'}, {"n": [{"a": 1}]}, n={"anyOf": [{"type": "array"}, {"type": "null"}]})
    assert not same("f", {"n": "5"}, {"n": 5}, n=TEXT) and not same("f", {"n": "5"}, {"n": 5}, n={})
    assert not same("f", {"n": "-2.50"}, {"n": "-2.5"}, n=TEXT) and not same("f", {"n": "1"}, {"n": True}, n=FLAG)
    assert not same("f", {"n": "5"}, {"n": 5}, n={"type": ["string", "integer"]})


def test_a_text_that_explains_a_call_doesnt_count_beside_what_the_call_does() -> None:
    assert same("Bash", {"command": "ls", "description": "List"}, {"command": "ls"})
    assert same("update_plan", {"plan": [], "explanation": "a"}, {"plan": []})
    assert same("think", {"thought": "a"}, {"thought": "b"})
    one, other = ({"todos": [{"content": "x", "activeForm": form}]} for form in "ab")
    assert same("TodoWrite", one, other)
    assert not same("create_issue", {"title": "x", "description": "a"}, {"title": "x", "description": "b"})
    assert not same("cancel", {"order": 1, "reason": "late"}, {"order": 1, "reason": "mistake"})
    assert not same("quiz", {"explanation": "a"}, {"explanation": "b"})
    enum = {"type": "string", "enum": ["a", "b"]}
    assert not same("f", {"x": 1, "thought": "a"}, {"x": 1, "thought": "b"}, thought=enum)
    assert not same("f", {"x": {"thought": "a"}}, {"x": {"thought": "b"}})


def test_more_such_arguments_are_the_users() -> None:
    one, other = (calls(call("f", {"a": 1, "note": text})) for text in "xy")
    for ignored in ("f.note", "*.note"):
        assert action_key(one, [], None, {ignored}) == action_key(other, [], None, {ignored})
    assert action_key(one, [], None, {"g.note"}) != action_key(other, [], None, {"g.note"})


def test_paths_are_compared_without_a_disk_and_from_the_sessions_folder() -> None:
    assert same("read", {"file_path": "./src//a/../b.py"}, {"file_path": "src/b.py"})
    assert same("read", {"filePath": "/src/"}, {"filePath": "/src"})
    assert same("read", {"paths": ["a/./b", "c"]}, {"paths": ["a/b", "c/"]})
    assert same("read", {"path": f"{CWD}/a.py"}, {"path": "a.py"}, CWD) and same("ls", {"dir": CWD}, {"dir": "."}, CWD)
    assert same("read", {"path": "../q/a"}, {"path": "/home/a/q/a"}, f"{CWD}/")
    assert not same("read", {"path": "a/b"}, {"path": "b"}) and not same("read", {"path": "/a"}, {"path": "a"})
    assert not same("read", {"path": f"{CWD}2/a.py"}, {"path": "2/a.py"}, CWD)
    assert not same("say", {"text": "a//b"}, {"text": "a/b"}) and not same("get", {"path": "//a"}, {"path": "/a"})
    assert not same("get", {"file": "s3://a//b"}, {"file": "s3://a/b"})
    assert not same("read", {"path": "*/../b"}, {"path": "b"})


def test_python_that_is_run_is_compared_by_its_syntax_tree() -> None:
    one = "x = {'a':1}   # what it holds\nprint( x )"
    assert same("run_python", {"code": one}, {"code": '\nx = {"a": 1}\nprint(x)\n'})
    assert same("execute", {"language": "python", "code": "f(1)"}, {"language": "python", "code": "f( 1 )"})
    assert not same("run_python", {"code": one}, {"code": "x = {'a': 2}\nprint(x)"})
    assert not same("run_python", {"code": "if x:\n    a()\n    b()"}, {"code": "if x:\n    a()\nb()"})
    assert not same("run_python", {"code": "plot(x)"}, {"code": "plot(x);"})
    assert not same("run_python", {"code": "  x"}, {"code": "x"})
    assert not same("execute", {"language": "js", "code": "f(1)"}, {"language": "js", "code": "f( 1 )"})
    assert not same("redeem", {"code": "1e3"}, {"code": "1000.0"})


def test_shell_commands_are_compared_by_their_words_where_a_shell_runs_them() -> None:
    assert same("bash", {"command": 'grep  -n "foo" src'}, {"command": "grep -n foo 'src' "})
    assert same("Bash", {"command": f"cd {CWD} && ls"}, {"command": "ls"}, CWD)
    assert same("bash", {"code": "ls  -la"}, {"code": "ls -al"})
    assert same("exec_command", {"cmd": "cat ./x", "workdir": CWD}, {"cmd": "cat x"}, CWD)
    assert same("exec_command", {"cmd": f"cat {CWD}/b/x", "workdir": "b/"}, {"cmd": "cat x", "workdir": "./b"}, CWD)
    assert not same("exec_command", {"cmd": f"cat {CWD}/x", "workdir": "b"}, {"cmd": "cat x", "workdir": "b"}, CWD)
    assert not same("exec_command", {"cmd": "make", "workdir": "b"}, {"cmd": "make"}, CWD)
    for name in ("sql", "PowerShell", "redis_command", "send"):
        assert not same(name, {"command": "x 'a'"}, {"command": 'x "a"'})
    assert not same("execute_bash", {"command": "  x", "is_input": "true"}, {"command": "x", "is_input": "true"})
    assert not same("shell", {"command": ["ls", "*"]}, {"command": ["bash", "-lc", "ls *"]})


def test_the_order_of_calls_that_only_read_makes_no_difference() -> None:
    one, other = call("read_file", {"path": "a"}, id="x"), call("WebSearch", {"query": "b"}, id="y")
    assert same_action(calls(one, other, content="I look at both."), calls(other, one), [])
    assert not same_action(calls(one, other), calls(one), []) and not same_action(calls(one), calls(one, one), [])
    assert not same_action(calls(call("read", {"path": "a"})), calls(call("open", {"path": "a"})), [])
    for name in ("Write", "search_replace", "Bash", "get_next_ticket"):
        writing = call(name, {"path": "a"})
        assert not same_action(calls(one, writing), calls(writing, one), [])


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [
        ("The answer\nis  42.", " the Answer is 42. ", True),
        ("**Fixed** it in `a.py`.\n\n## Tests\n* pass", "fixed it in a.py.\nTests\n- pass", True),
        ('```json\n{"a": 1, "b": [2]}\n```', '{"b":[2],"a":1}', True),
        ("So:\n```python\nf(1)\n```", "so:\n```py\nf(1)\n```", True),
        ("The answer is 42.", "The answer is 43.", False),
        ("Run `ls -A`.", "Run `ls -a`.", False),
        ("2**3 and 4**5", "23 and 45", False),
        ("`**/a` and `**/b`", "`/a` and `/b`", False),
        ("- 5 files", "-5 files", False),
        ("So:\n```\nif x:\n    a()\n    b()\n```", "So:\n```\nif x:\n    a()\nb()\n```", False),
        ("So:\n```\nX\n```\n", "So:\n```\nx\n```\n", False),
        ('Not this: ```json\n{"a": 1}\n```', 'This: ```json\n{"a": 1}\n```', False),
        ('{"a": "x"}', '{"a": "X"}', False),
        ("<bash>ls -A</bash>", "<bash>ls -a</bash>", False),
    ],
)
def test_texts_are_the_same_but_for_blanks_case_and_marks(one: str, other: str, want: bool) -> None:
    assert same_action(says(one), says(other), [tool("f")]) is want


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [
        ("I look.\n\n```bash\ncat   ./a\n```", "THOUGHT: now.\n```mswea_bash_command\ncat a\n```\n", True),
        ("Now.\n```\nopen 'a.py'\n```", "I open it.\n```\nopen a.py\n```", True),
        (f"```bash\ncd {CWD} && ls\n```", "Here:\n```bash\nls\n```", True),
        ("```\nedit 2:2\n    x\nend_of_edit\n```", "```\nedit 2:2\nx\nend_of_edit\n```", False),
        ("```bash\nls -A\n```", "```bash\nls -a\n```", False),
        ("Don't:\n```bash\nls\n```\nIt fails.", "Do:\n```bash\nls\n```\nIt works.", False),
        ("One:\n```bash\nls\n```\n```bash\nx\n```", "Two:\n```bash\nls\n```\n```bash\nx\n```", False),
        ("I would run `ls`.", "```bash\nls\n```", False),
        ("It is:\n```python\nx\n```", "It isn't:\n```python\nx\n```", False),
    ],
)
def test_without_tools_the_command_at_a_texts_end_is_the_action(one: str, other: str, want: bool) -> None:
    assert same_action(says(one), says(other), [], CWD) is want


def test_with_tools_a_command_in_a_text_is_no_action() -> None:
    assert not same_action(says("I look.\n```bash\nls\n```"), says("Now.\n```bash\nls\n```"), [tool("f")])
    assert not same_action(says("read"), calls(call("read")), [])


def test_a_last_message_is_prose_and_a_commits_is_not() -> None:
    assert same("finish", {"message": "**Done** in `a`.\n"}, {"message": "done in a."})
    assert not same("commit", {"message": "**Done**"}, {"message": "Done"})
    assert not same("finish", {"message": "Done", "code": "x"}, {"message": "Done", "code": "X"})


def test_arguments_that_are_no_json_stand_for_themselves() -> None:
    assert same("f", '{"a": ', '{"a": ') and not same("f", '{"a": ', '{"b": ')
    assert not same("f", "abc", '"abc"') and not same("apply_patch", "*** End\n", "*** End")
    deep = "[" * 100_000
    assert same("f", deep, deep) and not same("f", deep, deep + "[")


def test_schemas_of_any_shape_are_borne() -> None:
    for schema in (True, {"type": [{}]}, {"anyOf": 5}, {"properties": [], "required": True}, {"items": "x"}):
        one = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert same_action(calls(call("f", {"a": ["1"]})), calls(call("f", {"a": ["1"]})), [one])


def test_code_that_python_warns_of_or_cannot_hold_is_compared_all_the_same() -> None:
    assert normal_python("re.match('\\d', x)") == normal_python("re.match( '\\d',x )")
    for code in ("\0", "(" * 5000, "-" * 200_000 + "1", "\ud800"):
        assert normal_python(code) == code


NAMES = ["path", "command", "code", "a", "description", "workdir", "thought"]
TEXTS = st.sampled_from(["", "a", "./a", "a/", f"{CWD}/a", "ls  -la", "ls -al", "f( 1)", "f(1)", "5", "true", "null"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | TEXTS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)
schemas = st.dictionaries(
    st.sampled_from(NAMES),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "integer", "boolean", "array"])}, optional={"default": values}
    ),
    max_size=4,
)


def rewritten(value: Any) -> Any:
    """The same value in other words: keys backwards, whole numbers as floats."""
    if isinstance(value, dict):
        return {key: rewritten(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [rewritten(one) for one in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(["f", "Bash", "python"]), st.dictionaries(st.sampled_from(NAMES), values, max_size=4), schemas)
def test_arguments_in_other_words_are_the_same_and_those_with_one_more_not(name, arguments, properties) -> None:
    assert same(name, json.dumps(arguments), json.dumps(rewritten(arguments), indent=3), CWD, **properties)
    assert not same(name, json.dumps(arguments), json.dumps({**arguments, "one more": None}), CWD, **properties)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), values, max_size=3) | TEXTS, min_size=3, max_size=3), schemas)
def test_being_the_same_action_is_an_equivalence(three: list[Any], properties: dict[str, Any]) -> None:
    messages = [calls(call("Bash", one)) if isinstance(one, dict) else says(one) for one in three]
    tools = [tool("Bash", **properties)]
    equal = [[same_action(one, other, tools, CWD) for other in messages] for one in messages]
    assert all(equal[n][n] for n in range(3)) and all(equal[n][m] == equal[m][n] for n in range(3) for m in range(3))
    assert all(equal[n][k] for n in range(3) for m in range(3) for k in range(3) if equal[n][m] and equal[m][k])
