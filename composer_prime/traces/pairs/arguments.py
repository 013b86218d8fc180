"""The normal form of a tool call's arguments: two that do the same have the same form.

The schema and the names of tool and argument tell what an argument holds. In doubt the forms differ: a vote too few is
cheap, and a wrong agreement teaches the wrong thing. A text that none of the rules knows counts to its last newline.
"""

import ast
import json
import math
import posixpath
import re
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from composer_prime.traces.pairs.shell import normal_shell
from composer_prime.traces.states import canonical

EXPLAINING = frozenset(
    ("*.explanation", "*.justification", "*.reasoning", "*.thought", "Agent.description", "Task.description")
) | {"TodoWrite.activeForm", "think.thought"}
"""TOOL.ARGUMENT of texts that explain a call to a person; `*`: of any tool, unless it is all that the call says."""
_EXPLAINING_A_COMMAND = {"description", "reason"}
_DEFAULTS = {
    "Bash.timeout": 120_000, "Bash.run_in_background": False, "Edit.replace_all": False, "Glob.path": ".",
    "Grep.path": ".", "Grep.output_mode": "files_with_matches", "*.cwd": ".", "*.workdir": ".",
}  # fmt: skip
"""Where no schema states one, as in logs without tools."""
_MESSAGES = {"attempt_completion.result", "finish.message"}

_FILES = {"path", "paths", "filepath", "filename", "file", "files", "dir", "directory", "folder", "cwd", "workdir"}
_COMMANDS, _CODE = {"command", "commands", "cmd"}, {"code", "script"}
_SHELLS, _PYTHONS = {"bash", "sh", "shell", "zsh"}, {"python", "py", "ipython", "jupyter"}
_RUNNERS = _SHELLS | {"terminal", "exec", "execute", "run"}
_BESIDE = _COMMANDS | {"container", "console", "in", "local", "tool", "developer"}
_KINDS = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"}, dict: {"object"}}


def normal_arguments(
    tool: str, arguments: Any, schema: Any, cwd: str | None = None, explaining: Collection[str] = EXPLAINING
) -> Any:
    """A JSON value, equal for two calls of a tool with the same effect.

    arguments   JSON text, as chat completions carry it; text that isn't JSON stands for itself
    schema      JSON schema of the tool's parameters
    cwd         absolute path from which relative ones go
    explaining  TOOL.ARGUMENT whose values don't count
    """
    try:
        values = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        said = values if isinstance(values, Mapping) else {}
        return _Call(tool, said, cwd, explaining, _language(tool, said)).value(values, _mapping(schema), "")
    except (ValueError, TypeError, RecursionError):
        return ["not JSON", str(arguments)]


@dataclass(frozen=True)
class _Call:
    tool: str
    said: Mapping[str, Any]
    cwd: str | None
    explaining: Collection[str]
    language: str

    def value(self, value: Any, schema: Mapping[str, Any], name: str) -> Any:
        kinds = _kinds(schema)
        if isinstance(value, str) and kinds and "string" not in kinds:
            with suppress(ValueError, RecursionError):
                read = json.loads(value)
                value = read if _KINDS.get(type(read), set()) & kinds else value
        if isinstance(value, Mapping):
            return self._object(value, schema, is_whole=not name)
        if isinstance(value, list):
            if self.language == "shell" and name in ("command", "cmd") and all(isinstance(one, str) for one in value):
                return normal_shell(value, self._folder())
            return [self.value(one, _mapping(schema.get("items")), name or "-") for one in value]
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            return int(value)
        return self._text(value, name) if isinstance(value, str) and "enum" not in schema else value

    def _object(self, values: Mapping[str, Any], schema: Mapping[str, Any], *, is_whole: bool) -> dict[str, Any]:
        properties, required = _mapping(schema.get("properties")), schema.get("required") or ()
        found, explains = {}, set()
        for name, value in values.items():
            stated = _mapping(properties.get(name))
            default = stated.get("default", _DEFAULTS.get(f"{self.tool}.{name}", _DEFAULTS.get(f"*.{name}")))
            form, usual = (self.value(one, stated, name) for one in (value, default))
            is_null = value is None and name in properties and (default is None or "null" not in _kinds(stated))
            is_usual = is_null or (default is not None and canonical(form) == canonical(usual))
            if f"{self.tool}.{name}" not in self.explaining and (name in required or not is_usual):
                found[name] = form
            is_beside = f"*.{name}" in self.explaining or (self.language and name in _EXPLAINING_A_COMMAND)
            explains |= {name} if is_beside and isinstance(value, str) and "enum" not in stated else set()
        return {name: form for name, form in found.items() if not is_whole or name not in explains} or found

    def _text(self, text: str, name: str) -> Any:
        last, is_code = words_of(name)[-1], name in _CODE
        if self.language == "shell" and (is_code or last in _COMMANDS):
            return normal_shell(text, self._folder())
        if self.language == "python" and is_code and not any(words_of(one)[-1] in _FILES for one in self.said):
            return normal_python(text)
        if last in _FILES:
            return normal_path(text, self.cwd)
        return folded(text) if f"{self.tool}.{name}" in _MESSAGES else text

    def _folder(self) -> str | None:
        said = [self.said[name] for name in ("workdir", "cwd") if isinstance(self.said.get(name), str)]
        path = posixpath.normpath(posixpath.join(self.cwd or "", *said))
        return path if path.startswith("/") else None


def normal_path(path: str, cwd: str | None) -> str:
    """Relative where it lies in `cwd`; without looking at a disk. Patterns, addresses and `~` stay as they are."""
    if not path or path.startswith(("~", "//")) or re.search(r"[*?\[{\n]|://", path):
        return path
    whole = posixpath.normpath(posixpath.join(cwd or "", path))
    return posixpath.relpath(whole, cwd) if cwd and f"{whole}/".startswith(cwd.rstrip("/") + "/") else whole


def normal_python(code: str) -> str:
    """The syntax tree of Python code as text, so without comments and formatting; code that doesn't parse, as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in the teacher's code
        try:
            return ast.dump(ast.parse(code)) + ";" * code.rstrip().endswith(";")  # after it a notebook prints nothing
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return code


def folded(text: str) -> str:
    """A text without blanks, case and markdown's marks. Code in backticks keeps its case, code between fences all.

    A text with tags, or a fence that doesn't end, may be an action in a notation of its own: it stays as it is.
    """
    if re.search(r"<[\w/]", text) or text.count("```") % 2:
        return text
    pieces = re.split(r"```[^\n]*\n(.*?)```", text, flags=re.DOTALL)
    return "```".join(one if number % 2 else _folded_prose(one) for number, one in enumerate(pieces))


def _folded_prose(text: str) -> str:
    text = re.sub(r"(?m)^[ \t]*[*-][ \t]+", "- ", re.sub(r"(?m)^#{1,6}[ \t]+", "", text))
    pieces = re.split(r"`([^`\n]+)`", text)
    for number in range(0, len(pieces), 2):
        bold = r"(?s)(?<![\w*])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w*])"
        pieces[number] = re.sub(bold, r"\1", pieces[number]).casefold()
    return " ".join("".join(pieces).split())


def words_of(name: str) -> list[str]:
    """The words of a name in snake_case or camelCase, in lower case; at least one."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()) or [""]


def _language(tool: str, said: Mapping[str, Any]) -> str:
    """shell, python or nothing: what a call says that it runs, else what the tool's name says."""
    language, words = said.get("language"), set(words_of(tool))
    if isinstance(language, str):
        return "shell" if language in _SHELLS else "python" if language.lower().startswith(("py", "ipy")) else ""
    if str(said.get("is_input")).lower() == "true":  # keys for what runs already
        return ""
    return "python" if words & _PYTHONS else "shell" if words & _RUNNERS and words <= _RUNNERS | _BESIDE else ""


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    said = schema.get("type") or ()
    among = [_mapping(one) for name in ("anyOf", "oneOf") for one in schema.get(name) or ()]
    return ({said} if isinstance(said, str) else set(said)).union(*map(_kinds, among))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
