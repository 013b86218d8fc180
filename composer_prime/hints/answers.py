"""What a tool's answer says of its call: whether it failed, by which kind of error, and in which line.

It is looked for where tools say it, in an answer's first words and its last lines, since any text may stand between
them: files, logs and search results are full of errors that are nobody's here. docs/teachers.md lists what is known.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from composer_prime.config.teachers import HintKind

LINE_CHARS = 200
"""Characters of the telling line, and of a tool's name, that a hint may quote."""
_TEXT_CHARS = 20_000
"""Of a longer answer so much at its beginning, and as much at its end, is looked at."""
_LAST_LINES = 8
_WORDS_CHARS = 400
"""Of a line so much is compared with what errors say."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SHOWN = re.compile(
    r"<returncode>|<exception>|the last command\b|observation:|execution result(?: of \[\w+\])?:|call id: |"
    r"new terminal output:|previous response had (?:parsing errors|warnings):",
    re.IGNORECASE,
)
"""How a user's message begins that shows a tool's output."""
_MARKER = re.compile(
    r"</?\w+>|\W+|call id: \S+$|\S+[$#] .*$|wall time: .*$|"
    r"(?:observation|execution result(?: of \[\w+\])?|new terminal output|output):|"
    r"(?P<error>error(?: executing tool\b[^:]*)?:|previous response had parsing errors:|"
    r"an error occurred while running the tool\.(?: please try again\.)?)",
    re.IGNORECASE,
)
"""What may stand before an answer's own words, shells' prompts too; some of it says that they are an error."""
_NOTHING = re.compile(r"(?:null|none|false|0)\b", re.IGNORECASE)
"""What may follow "error:" where there is none."""
_TRACEBACK = re.compile(r"\s*(?:\+ Exception Group )?Traceback \(most recent call last\)")
_EXCEPTION = re.compile(r"[|\s]*[A-Za-z_][\w.]*(?::|$)")
_TESTS = re.compile(
    r"FAILED \S+::|(?:= ?)*(?:\d+ \w+, )*[1-9]\d* (?:failed|errors?)(?:, \d+ \w+)* in [\d.]+ ?s\b|"
    r"FAILED \((?:failures|errors)=|Tests: +[1-9]\d* failed\b|test result: FAILED\b|--- FAIL: "
)
_STATUS = re.compile(
    r"\W*(?:(?:the )?(?:command|process)? ?(?P<failed>failed)? ?(?:completed|finished|exited)? ?(?:with )?)?"
    r"(?:exit(?:ed with)?|return)?[ _]?(?:code|status)\W{0,4}(?P<code>-?\d{1,10})\W*(?:returncode>)?",
    re.IGNORECASE,
)
"""A line in which a harness says how a command ended, and nothing else."""
_PLACE = re.compile(r"[\w./-]+[:-]\d+[:-](?!.*\berror:)|#")
"""How a line begins that quotes another text: a search's result, a heading."""
_SAID: Mapping[HintKind, Sequence[str]] = {
    "unknown_tool": (
        r"(?:unknown|no such) tool\b",
        r"(?:unknown|no such) function[: '\"`]",
        r"tool not found: ",
        r"tool \S+ (?:is )?(?:not (?:found|known|available|registered)|unknown|does not exist)\b(?!,)",
        r"function ['\"`]\S+ (?:is )?not (?:found|available)\b(?! in)",
        r"\S+ is not a valid tool\b",
    ),
    "bad_arguments": (
        r"(?:\S+ )?(?:invalid|malformed) (?:tool )?(?:json|arguments?|parameters?)(?: \w+)*(?:[:.]|$)",
        r"(?:invalid|no valid) json (?:in|for|found)\b",
        r"failed to parse (?:the )?(?:json|arguments)\b",
        r"\w*ValidationError[:(]",
        r"(?:\S+ )?\d+ validation errors? for\b",
        r"tool arguments must\b",
        r"\w+\(\) (?:missing \d+ required|got an unexpected keyword argument)\b",
        r"the required parameter\b",
        r"mcp error -32602\b",
        r"no replacement was performed\b",
    ),
    "timeout": (
        r"(?:the )?(?:last )?(?:command|call|tool|execution|operation|process|script)\b.*\btimed out\b",
        r"timed out after\b",
        r"timeout(?:error)?(?::| after| expired| exceeded)",
        r"deadline exceeded\b",
    ),
    "error": (
        r"(?-i:(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?::|$| ['\"(]))",
        r"(?:[\w./-]+:\d+:(?:\d+:)? )?(?:fatal )?error: ",
        r"error(?:\[\w+\]:| \w*\d+ ?[(:])",
        r"error (?:\w+ing|while|in|from) \S",
        r"an (?:unexpected )?error occurred\b",
        r"(?:[\w./-]+: )+(?:.*: )?(?:no such file or directory|permission denied|command not found|not found)$",
        r"(?:[\w./-]+: )+cannot access\b",
        r"(?:no such file or directory|permission denied): ",
        r"the (?:path|file) \S+ does not exist\b|file does not exist\b",
        r"string to replace not found\b",
        r"your proposed edit has introduced new syntax error\b",
        r"npm (?:err!|error) |make: \*\*\* |curl: \(\d+\) |fatal: \S",
        r"exception in thread |panic: |thread '.*' panicked\b|segmentation fault\b",
    ),
}
"""What an answer's first words say, by kind; the first that fits counts."""
_KINDS: Mapping[HintKind, re.Pattern[str]] = {
    kind: re.compile("|".join(patterns), re.IGNORECASE) for kind, patterns in _SAID.items()
}
_EXIT_KEYS = ("exit_code", "exitcode", "returncode", "return_code")
_ERROR_FLAGS = ("is_error", "isError")


def shows_output(text: str) -> bool:
    """Whether a user's message shows a tool's output, as some harnesses do it."""
    return _SHOWN.match(text.lstrip()) is not None


def find_error(text: str) -> tuple[HintKind, str] | None:
    """What kind of error a tool's answer shows, and the line that tells it; None for an answer without one.

    A harness that says how a command ended is believed: code 0 is no error, whatever the command printed.
    """
    if len(text) > 2 * _TEXT_CHARS:
        text = f"{text[:_TEXT_CHARS]}\n{text[-_TEXT_CHARS:]}"
    rows = [row.rstrip()[:_WORDS_CHARS] for row in _ESCAPES.sub("", text).splitlines() if row.strip()]
    lines = [row.strip() for row in rows]
    declared = _parse(text)
    if declared is not None:
        return _find_declared(declared)
    ends = {place for place, line in enumerate(lines) if place < 2 or place >= len(lines) - _LAST_LINES}
    statuses = {place: found for place in sorted(ends) if (found := _STATUS.fullmatch(lines[place])) is not None}
    codes = [int(found["code"]) for found in statuses.values()]
    if codes and not any(codes):
        return None
    if (line := _exception(rows)) is not None:
        return "traceback", line
    if (line := next((lines[place] for place in sorted(ends) if _TESTS.match(lines[place])), None)) is not None:
        return "tests", line[:LINE_CHARS]
    told = _told(lines)
    if not codes:
        return told
    printed = [line for place, line in enumerate(lines) if place not in statuses and _words(line)[0]]
    if told is None and not printed and codes == [1] and not any(found["failed"] for found in statuses.values()):
        return None  # as of a search that finds nothing
    status = next(lines[place] for place, found in statuses.items() if int(found["code"]))
    return "exit_code", told[1] if told is not None else (printed or [status])[-1][:LINE_CHARS]


def find_hint(text: str) -> str | None:
    """What a tool that answers with a JSON object says to do instead, as `hint`; None: nothing."""
    declared = _parse(text)
    hint = declared.get("hint") if isinstance(declared, dict) else None
    return hint.strip()[:LINE_CHARS] or None if isinstance(hint, str) else None


def _exception(rows: Sequence[str]) -> str | None:
    """The line of the last traceback that names the exception."""
    headers = [place for place, row in enumerate(rows) if _TRACEBACK.match(row)]
    if not headers:
        return None
    after = rows[headers[-1] + 1 :]
    depth = len(rows[headers[-1]]) - len(rows[headers[-1]].lstrip())
    named = (row.strip() for row in after if len(row) - len(row.lstrip()) <= depth and _EXCEPTION.match(row))
    return next(named, rows[-1].strip())[:LINE_CHARS]


def _words(line: str) -> tuple[str, bool]:
    """A line without its markers, and whether they say that it is an error."""
    is_error = False
    while marker := _MARKER.match(line):
        is_error |= marker["error"] is not None
        line = line[marker.end() :]
    return line, is_error


def _told(lines: Sequence[str]) -> tuple[HintKind, str] | None:
    """The error in an answer's first words, what stands before them left out."""
    is_error = False
    for line in lines:
        words, says_so = _words(line)
        if _PLACE.match(line) and not is_error:
            return None
        is_error |= says_so
        if not words or _STATUS.fullmatch(line):
            continue
        kinds: list[HintKind] = [kind for kind, said in _KINDS.items() if said.match(words) or said.match(line)]
        if _NOTHING.match(words):
            return None
        if kinds:
            return kinds[0], line[:LINE_CHARS]
        return ("error", line[:LINE_CHARS]) if is_error else None
    return ("error", lines[0][:LINE_CHARS]) if is_error else None


def _parse(text: str) -> dict[str, Any] | list[Any] | None:
    """A tool's answer that is JSON: what it declares counts, not the words in it."""
    shown = _SHOWN.match(text.lstrip())
    try:
        answer = json.loads(text.lstrip()[shown.end() :] if shown is not None else text)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict | list) else None


def _find_declared(answer: dict[str, Any] | list[Any]) -> tuple[HintKind, str] | None:
    """The error that a tool's JSON object declares; a list declares none."""
    if isinstance(answer, list):
        return None
    code = next((answer[key] for key in _EXIT_KEYS if isinstance(answer.get(key), int)), 0)
    told = next((text for key in ("error", "stderr", "message", "content") if (text := _said(answer.get(key)))), "")
    line = next((line.strip() for line in reversed(told.splitlines()) if line.strip()), "")[:LINE_CHARS]
    if answer.get("error_kind") in get_args(HintKind):
        return answer["error_kind"], line or answer["error_kind"]
    if code != 0:
        return "exit_code", line or f"exit code {int(code)}"
    failed = bool(answer.get("error")) or answer.get("status") == "error" or answer.get("success") is False
    if failed or any(answer.get(flag) is True for flag in _ERROR_FLAGS):
        return "error", line or "error"
    return None


def _said(value: Any) -> str:
    """The text of a field that says what is wrong: itself, its message, or its first part's."""
    if isinstance(value, list):
        value = value[0] if value else ""
    if isinstance(value, Mapping):
        value = value.get("message") or value.get("text") or ""
    return value if isinstance(value, str) else ""
