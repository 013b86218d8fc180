"""Which messages are the same action: calls by their arguments' meaning, text by its words."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.traces.pairs.actions import same_action
from composer_prime.traces.pairs.arguments import normal_python, normal_shell
from tests.traces.pairs.building import call, calls, says, tool


def same(name: str, one: Any, other: Any, **properties: Any) -> bool:
    """Whether two calls of a tool with these arguments are the same action."""
    return same_action(calls(call(name, one)), calls(call(name, other)), [tool(name, **properties)])


def test_key_order_spaces_and_whole_numbers_make_no_difference() -> None:
    assert same("f", '{"a": 1, "b": [2.0, {"c": "x"}]}', '{"b":[2,{"c":" x\\n"}],"a":1.0}')
    assert not same("f", {"a": 1}, {"a": 2}) and not same("f", {"a": 1}, {"a": "1"}) and not same("f", {"a": 1}, {})
    assert not same("f", {"a": 1}, {"a": True}) and not same("f", {"a": [1, 2]}, {"a": [2, 1]})
    assert not same("f", {"a": 0.5}, {"a": 0})


def test_what_a_call_leaves_out_is_its_schemas_default() -> None:
    nested = {"type": "object", "properties": {"depth": {"default": 3}}}
    schemas: dict[str, Any] = {"limit": {"type": "integer", "default": 10}, "how": nested}
    assert same("f", {"how": {}}, {"limit": 10.0, "how": {"depth": 3}}, **schemas)
    assert not same("f", {"how": {}}, {"limit": 11, "how": {}}, **schemas)
    assert same("f", "", {"limit": 10}, **schemas) and not same("f", "", {"limit": 10})


def test_paths_are_compared_without_a_disk() -> None:
    assert same("read", {"file_path": "./src//a/../b.py"}, {"file_path": "src/b.py"})
    assert same("read", {"filePath": "/src/"}, {"filePath": "/src"})
    assert same("read", {"paths": ["a/./b", "c"]}, {"paths": ["a/b", "c/"]})
    assert not same("read", {"path": "a/b"}, {"path": "b"}) and not same("read", {"path": "/a"}, {"path": "a"})
    assert not same("say", {"text": "a//b"}, {"text": "a/b"})


def test_python_is_compared_by_its_syntax_tree() -> None:
    one = "x = {'a':1}   # what it holds\nprint( x )"
    assert same("run_python", {"code": one}, {"code": '\n    x = {"a": 1}\n    print(x)\n'})
    assert not same("run_python", {"code": one}, {"code": "x = {'a': 2}\nprint(x)"})
    assert not same("run_python", {"code": "if x:\n    a()\n    b()"}, {"code": "if x:\n    a()\nb()"})
    assert same("run_python", {"code": "this is (not"}, {"code": " this is (not\n"})
    assert same("execute", {"language": "python", "code": "f(1)"}, {"language": "python", "code": "f( 1 )"})
    assert not same("execute", {"language": "js", "code": "f(1)"}, {"language": "js", "code": "f( 1 )"})


def test_shell_commands_are_compared_by_their_words() -> None:
    assert same("bash", {"command": 'grep  -n "foo" src'}, {"command": "grep -n foo 'src' "})
    assert same("bash", {"command": "a&&b"}, {"command": "a && b"})
    assert same("bash", {"command": "cd a\nls"}, {"command": "cd a \n  ls"})
    assert same("bash", {"code": "ls  -la"}, {"code": "ls -la"})
    assert not same("bash", {"command": "ls -la"}, {"command": "ls -l -a"})
    assert not same("bash", {"code": "ls -la"}, {"code": "ls - la"})
    assert not same("bash", {"command": "it's"}, {"command": "that's"})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cd a\nls", "cd a ls"),
        ("echo '$HOME'", "echo $HOME"),
        ("echo '$HOME'", 'echo "$HOME"'),
        ("rm '*'", "rm *"),
        ("rm \\*", "rm *"),
        ('grep "a|b" f', "grep a|b f"),
        ('echo "&&" b', "echo && b"),
        ('echo "a  b"', 'echo "a b"'),
        ("echo ''", "echo"),
        ("python - <<E\nif x:\n    a()\n    b()\nE", "python - <<E\nif x:\n    a()\nb()\nE"),
    ],
)
def test_shell_commands_that_do_other_things_stay_apart(one: str, other: str) -> None:
    assert normal_shell(one) != normal_shell(other)


def test_escaped_and_continued_shell_words_are_the_plain_ones() -> None:
    assert normal_shell("rm \\*") == normal_shell("rm '*'") == normal_shell('rm "*"')
    assert normal_shell("ls \\\n  -la") == normal_shell("ls -la")


def test_parallel_calls_are_the_same_in_any_order_and_with_any_text_beside_them() -> None:
    one, other = call("read", {"path": "a"}, id="x"), call("read", {"path": "b"}, id="y")
    assert same_action(calls(one, other, content="I look at both."), calls(other, one), [])
    assert not same_action(calls(one, other), calls(one), [])
    assert not same_action(calls(one), calls(one, one), [])
    assert not same_action(calls(call("read", {"path": "a"})), calls(call("open", {"path": "a"})), [])


def test_text_without_calls_is_the_same_but_for_whitespace_and_case() -> None:
    assert same_action(says("The answer\nis  42."), says(" the Answer is 42. "), [])
    assert not same_action(says("The answer is 42."), says("The answer is 43."), [])
    assert not same_action(says("read"), calls(call("read")), [])


def test_arguments_that_are_no_json_stand_for_themselves() -> None:
    assert same("f", '{"a": ', ' {"a":') and not same("f", '{"a": ', '{"b": ')
    assert not same("f", "abc", '"abc"')
    deep = "[" * 100_000
    assert same("f", deep, deep) and not same("f", deep, deep + "[")


def test_code_that_python_warns_of_or_cannot_hold_is_compared_all_the_same() -> None:
    assert normal_python("re.match('\\d', x)") == normal_python("re.match( '\\d',x )")
    for code in ("\0", "(" * 5000, "-" * 200_000 + "1", "\ud800"):
        assert normal_python(code) == normal_python(code + "\n")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["path", "command", "code", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def rewritten(value: Any) -> Any:
    """The same value in other words: keys backwards, whole numbers as floats, spaces around texts."""
    if isinstance(value, dict):
        return {key: rewritten(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [rewritten(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return f" {value}\n" if isinstance(value, str) else value


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(["path", "command", "code", "a", "b"]), values, max_size=4))
def test_arguments_in_other_words_are_the_same_and_those_with_one_more_not(arguments: dict[str, Any]) -> None:
    assert same("f", json.dumps(arguments), json.dumps(rewritten(arguments), indent=3))
    assert not same("f", json.dumps(arguments), json.dumps({**arguments, "one more": None}))
