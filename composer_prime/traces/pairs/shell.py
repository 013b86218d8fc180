"""The normal form of a shell command: its words, whatever their quotes, blanks and the order of their flags.

This parser knows less than a shell. A command with anything else in it, as a substitution, stays text.
"""

import getopt
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

_FLAGS = {
    "cat": "AbEnsTv", "cd": "", "cp": "afprRv", "grep": "cEhilnoqrsvwxA:B:C:e:m:", "head": "n:", "ls": "adFhilRrt",
    "mkdir": "p", "mv": "v", "nl": "b:", "rg": "Filnowg:t:A:B:C:e:m:", "rm": "frRv", "sed": "nEr", "sort": "nru",
    "tail": "n:", "touch": "", "wc": "clmw",
}  # fmt: skip
"""Programs whose operands are files, and those of their flags whose order tells nothing, as getopt spells them."""
_PATTERN_FIRST, _FOLDERS = {"grep", "rg", "sed"}, {"cd", "grep", "ls", "rg"}
"""The latter do the same in `a/` as in `a`, and in `.` as in its absolute path; `cp`, `mv`, `rm` and others don't."""
_OPENING = re.compile(r"(?:if|then|elif|else|while|until|do|!|\{|time)\Z|[A-Za-z_]\w*\+?=")
_MOVES = re.compile(r"cd|pushd|popd|source|\.|eval|builtin|command")
_KEEPS = re.compile(rf"[=($`{{]|(?<!\S)(?:{_MOVES.pattern}|alias|exec|exit|export|read|set|trap|unset|wait)(?![^\s;])")
"""What a shell may keep of a command, or that only a shell can do."""

_SPECIAL = " \t\n;&|()<>\"'\\$`*?[]{}~!#"
_LITERAL = {ord(one): 0xE000 + ord(one) for one in _SPECIAL}
"""Private characters that stand for quoted ones: `'*'` isn't `*` to a shell."""
_WORD = r"""(?:[^ \t\n;&|()<>"'\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+"""
_PART = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^'"\\]+""", re.DOTALL)
_TOKEN = re.compile(
    r"(?P<blank>(?:[ \t]|\\\n)+|(?<![^ \t\n;|&()<>])#[^\n]*)|(?!\[\[|\(\(|\{\w+\}[<>])(?:"
    r"(?P<document>\d*<<-?)[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)(?![^\s;&|()<>])"
    rf"|(?P<redirection>(?:\d+|&)?(?:>>|>\||>&|<<<|<&|<>|[<>]))[ \t]*(?P<target>{_WORD})"
    rf"|(?P<operator>\n|&&|\|\||;;|\|&|[;|&()])|(?P<word>{_WORD}))",
    re.DOTALL,
)
Token: TypeAlias = tuple[str, str, str]
"""A "word", as it is written and without quotes; a "target", its redirection and itself; or an "operator"."""


def normal_shell(command: str | Sequence[str], folder: str | None = None) -> Any:
    """A JSON value, equal for two commands that do the same in bash, in the folder of that absolute path.

    A list of words is a command that no shell reads, unless it calls one.
    """
    if not isinstance(command, str):
        name, *rest = command or ["=", ""]
        if name in ("bash", "sh", "zsh") and len(rest) == 2 and rest[0] in ("-c", "-lc"):
            return [
                "argv",
                [name, rest[0]] if (name, rest[0]) != ("bash", "-lc") else [],
                normal_shell(rest[1], folder),
            ]
        words = [("word", word := one.translate(_LITERAL), word) for one in command]
        return ["argv", [], list(command) if _KEEPS.search(name) or _OPENING.match(name) else _form(words, folder)]
    if folder is not None:
        quote = "['\"]?" if re.fullmatch(r"[\w./@%+,:-]+", folder) else "['\"]"
        enters = rf"\A\s*cd[ \t]+({quote}){re.escape(folder)}/?\1[ \t]*(?:&&|;|\n)\s*(?=[^\s;&|])"
        command = re.sub(enters, "", command)
    try:
        tokens = _tokens(command)
    except ValueError:
        return command.strip("\n")
    if [token[:2] for token in tokens[:-1]] == [("word", "bash"), ("word", "-lc")] and tokens[2][0] == "word":
        inner = tokens[2][2].translate({quoted: plain for plain, quoted in _LITERAL.items()})
        if not set(tokens[2][2]) & set(_SPECIAL) and not _KEEPS.search(inner):
            return normal_shell(inner, folder)
    return _form(tokens, folder)


def _tokens(command: str) -> list[Token]:
    """Raises ValueError where there is more in a command than this parser knows."""
    tokens: list[Token] = []
    at = 0
    while at < len(command):
        found = _TOKEN.match(command, at)
        if found is None or re.search(r"[\ue000-\uefff]", found[0]):
            raise ValueError(command)
        at = found.end()
        if found["document"]:
            line, _, rest = command[at:].partition("\n")
            tabs = r"\t*" if found["document"].endswith("-") else ""
            body, rest = re.split(rf"(?m)^{tabs}{found['end']}$", rest, maxsplit=1)
            expands = "$" if not found["quote"] and re.search(r"[$`\\]", body) else ""
            tokens.append(("target", found["document"] + expands, body))
            command = command[:at] + line + rest
        elif found["blank"] is None:
            word = _unquoted(found["target"] or found["word"] or "")
            tokens.append((str(found.lastgroup), found["redirection"] or found[0], word))
    return tokens


def _unquoted(word: str) -> str:
    """A word with literal characters for what its quotes hide; as it is written where the shell puts something in."""
    said = ""
    for part in _PART.findall(word):
        if part[0] == '"':
            if re.search(r"`|\$[({]", part):
                raise ValueError(word)
            said += "$" if re.search(r"\$[\w@*#?$!\[-]", part) else ""
            part = re.sub(r'\\(["\\$]|\n)', lambda escaped: escaped[1].strip("\n"), part[1:-1]).translate(_LITERAL)
        elif part[0] in "'\\":
            part = (part[1:-1] if part[0] == "'" else part[1:].strip("\n")).translate(_LITERAL)
        elif re.search(r"`|\$(?![\w@*#?$!-])", part):
            raise ValueError(word)
        said += part
    return word if "$" in said or (said != word and set(said) & set("[{~")) else said


def _form(tokens: Sequence[Token], folder: str | None) -> list[Any]:
    """Simple commands, each with its redirections, and the operators between them."""
    moves = any(kind == "word" and _MOVES.fullmatch(word) for kind, word, _ in tokens)
    form: list[Any] = []
    words: list[tuple[str, str]] = []
    redirections: list[list[str]] = []
    for kind, one, other in [*tokens, ("operator", "", "")]:
        there = None if moves and form else folder
        begins = bool(words) and all(_OPENING.fullmatch(word) and word[-1] != "=" for word, _ in words)
        if kind == "word":
            words.append((one, other))
        elif kind == "target":
            redirections.append([one, _file(other, there) if one in (">", ">>", "<") else other])
        elif one != "\n" or (words and not begins) or redirections or form[-1:] == [")"]:
            form += [[_simple(words, there), redirections]] if words or redirections else []
            form.append(";" if one == "\n" else one)
            words, redirections = [], []
    return form[:-2] if form[-2:] == [";", ""] else form[:-1]


def _simple(words: Sequence[tuple[str, str]], folder: str | None) -> list[Any]:
    """A simple command. The name of its program counts as it is written: `'if'` isn't `if`."""
    start = next((number for number, (word, _) in enumerate(words) if not _OPENING.match(word)), len(words))
    before = [*(word for _, word in words[:start]), *(word for word, _ in words[start : start + 1])]
    program, rest = before[-1] if before else "", [word for _, word in words[start + 1 :]]
    if program in ("head", "tail"):
        rest = [re.sub(r"\A-(?=\d+\Z)", "-n", word) for word in rest]
    try:
        options, operands = getopt.gnu_getopt(rest, _FLAGS[program])
    except (KeyError, getopt.GetoptError):
        return [*before, *rest]
    if any("$" in word for word in rest):
        return [*before, *rest]
    flags = sorted({name for name, value in options if not value})
    valued = sorted((option for option in options if option[1]), key=lambda option: option[0])
    first = program in _PATTERN_FIRST
    files = [_file(word, folder, is_folder=program in _FOLDERS) for word in operands[first:]]
    return [*before, [*flags, *valued], *operands[:first], *files]


def _file(word: str, folder: str | None, *, is_folder: bool = False) -> str:
    """A path without `./` and `//`, relative where it lies in the folder; as it is where that could be another's."""
    path, root = word, (folder or "").rstrip("/").translate(_LITERAL)
    if folder is not None and (path == root or path.startswith(root + "/")):
        path = "./" + path[len(root) :].lstrip("/")
    path = re.sub(r"(?<=.)/(?:\.?/)+", "/", path).removeprefix("./")
    if is_folder and word:
        path = re.sub(r"(?<=[^/])/+\Z", "", path) or "."
    return word if not path or path[0] in "-~*?[{" or "$" in word else path
