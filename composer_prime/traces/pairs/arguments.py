"""The normal form of a tool call's arguments: two that do the same have the same form.

An argument's name tells what it holds: a path, a shell command, or code in the language that the call names. In doubt
the forms differ: a pair too many teaches less than a vote counted for another act.
"""

import ast
import json
import math
import posixpath
import re
import shlex
import textwrap
import warnings
from collections.abc import Mapping
from typing import Any

_PATHS = {"path", "paths", "filepath", "filename", "file", "files", "dir", "directory", "folder", "cwd", "workdir"}
_COMMANDS = {"command", "commands", "cmd"}
_CODE = {"code", "python", "script"}
_SHELLS = {"bash", "sh", "shell", "zsh", "terminal"}

_OPERATORS = "();<>|&\n"
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_LITERAL = {ord(one): 0xE000 + ord(one) for one in _OPERATORS + "$`*?[]{}~!#"}
_EXPANDED = _LITERAL | {ord(one): 0xE100 + ord(one) for one in "$`"}
"""Private characters that stand for a quoted one: shlex takes the quotes away, and `'$x'` isn't `$x` to a shell."""


def normal_arguments(tool: str, arguments: Any, schema: Mapping[str, Any]) -> Any:
    """A JSON value, equal for two calls of a tool with the same effect.

    tool       its name
    arguments  JSON text, as chat completions carry it; text that isn't JSON stands for itself
    schema     JSON schema of the tool's parameters: its defaults fill what a call leaves out

    Key order, surrounding whitespace and 1 against 1.0 make no difference. Paths are normalised without looking at a
    disk, Python code is compared by its syntax tree and shell commands by their words.
    """
    try:
        values = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        return _normal(values, schema, "", tool, _language(tool, values))
    except (ValueError, RecursionError):
        return ["not JSON", str(arguments).strip()]


def _normal(value: Any, schema: Any, name: str, tool: str, language: str) -> Any:
    if isinstance(value, Mapping):
        properties = _mapping(_mapping(schema).get("properties"))
        stated = {key: one["default"] for key, one in properties.items() if "default" in _mapping(one)}
        filled = {**stated, **value}
        return {key: _normal(one, properties.get(key), key, tool, language) for key, one in filled.items()}
    if isinstance(value, list):
        return [_normal(one, _mapping(schema).get("items"), name, tool, language) for one in value]
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return _normal_text(value, name, language) if isinstance(value, str) else value


def _normal_text(text: str, name: str, language: str) -> Any:
    words = _words(name)
    if words & _COMMANDS:
        return normal_shell(text)
    if words & _CODE:
        return {"python": normal_python, "shell": normal_shell}.get(language, str.strip)(text)
    if words & _PATHS:
        return posixpath.normpath(text.strip())
    return text.strip()


def normal_python(code: str) -> str:
    """The syntax tree of Python code as text, so without comments and formatting; code that doesn't parse, stripped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in the teacher's code
        try:
            return ast.dump(ast.parse(textwrap.dedent(code).strip()))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return code.strip()


def normal_shell(command: str) -> list[str] | str:
    """The words and operators of a shell command; stripped, where it has a here-document or a quote that doesn't end.

    What is quoted stays apart from what the shell expands, as `'*'` from `*`, and a line's end from a space.
    """
    lexer = shlex.shlex(_QUOTED.sub(_shielded, command.strip()), posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    try:
        return command.strip() if "<<" in command else list(lexer)
    except ValueError:
        return command.strip()


def _shielded(quoted: re.Match[str]) -> str:
    text = quoted[0]
    if text == "\\\n":
        return ""
    return text.translate(_EXPANDED if text[0] == '"' else _LITERAL)


def _language(tool: str, arguments: Any) -> str:
    """python, shell, or another one's name: what the call says, else what the tool's name says, else Python."""
    said = _mapping(arguments).get("language")
    if not isinstance(said, str):
        return "shell" if _words(tool) & _SHELLS else "python"
    said = said.strip().lower()
    return "shell" if said in _SHELLS else "python" if said.startswith(("py", "ipy")) else said


def _words(name: str) -> set[str]:
    """The words of a name in snake_case or camelCase, in lower case."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
