"""Cuts secrets out of every text that is meant for people or third parties; protocol, samples and weights stay.

It knows the values of variables that are named like secrets, keys and passwords by their forms, and, where the library
is installed, the forms of detect-secrets. One file, standard library only, Python 3.9 or later: it is copied to
machines that have nothing of ours. Run as `python3 redaction.py`, it passes standard input on to standard output, line
by line, without secrets and with control characters spelled.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping

TYPE_CHECKING = False  # as typing has it, which takes as long to import as all of this
if TYPE_CHECKING:
    from typing import Any

SECRET_NAMES_VARIABLE = "COMPOSER_PRIME_SECRETS"
"""Names, with commas, the variables whose values a site must keep out of what it writes."""
_SECRET_NAME = re.compile(
    r"(?i)(KEY|TOKEN|COOKIE|_PWD|_PAT|_DSN)$|SECRET|CREDENTIAL|(?<![A-Z])PASS|PASS$|PASSW|PASSPHRASE"
)
"""How variables are named that are secret wherever they are set."""
_CREDENTIALS = re.compile(r"(?:://[^\s/:@]*:|AccountKey=|SharedAccessKey=)([^\s/@;]{6,}[^\s@;]*)")
SHOWN = ("AWS_ACCESS_KEY_ID",)
"""Variables that go the way of secrets and are none: a key's id is a name, and may well be an everyday word."""

HIDDEN = "[redacted]"
MIN_SECRET_LENGTH = 6
"""Shorter values are words like any other: cutting "1" out of a log would leave no log."""
MIN_GUESSED_LENGTH = 8
"""The same for variables that were not given as secrets, but are named like some."""
MIN_SECRET_LINE_LENGTH = 16
"""Of a value of several lines, those so long are cut out alone too: logs put things between lines."""

_CHUNK_BYTES = 1 << 16
_LAST_WORD = re.compile(rb"[\w+/=.~-]*\Z")
_MAX_LINE_BYTES = 1 << 16
"""A longer line, or private key, is passed on in pieces."""
_CONTROL = re.compile(  # beside what ends a line
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)

_ASSIGNED = r"""[\\"'\]]{0,4}\s{0,3}(?:=>|:=|[=:])\s{0,3}"""
_NO_PLAIN_VALUE = re.compile(r"""[\\"'`,;<>{}()\[\]$]""")
_OPENED = r"""[\\"'(]{0,4}"""
_VALUE = r"""[^\s\\"'`,;<>{}()\[\]$]{8,}"""
FORMS: Mapping[str, str] = {
    "Anthropic key": r"(?<![A-Za-z0-9])sk-ant-[A-Za-z0-9_-]{20,}",
    "OpenAI key": r"(?<![A-Za-z0-9])sk-(?:proj-|svcacct-|admin-|or-v1-)?(?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{20,}",
    "GitHub token": r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "AWS key": r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    "AWS secret key": r"(?i:aws_?secret_?access_?key)\W{1,6}(?P<aws>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])",
    "Google key": r"(?<![A-Za-z0-9])(?:AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,})",
    "Slack token": r"(?<![A-Za-z0-9])(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}",
    "Stripe key": r"(?<![A-Za-z0-9])(?:[prs]k_(?:live|test)|whsec)_[A-Za-z0-9]{16,}",
    "SendGrid key": r"(?<![A-Za-z0-9])SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    "JSON web token": r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",
    "Azure key": r"(?i:AccountKey|SharedAccessKey|[?&]sig|X-Amz-(?:Signature|Security-Token))="
    r"(?P<azure>[A-Za-z0-9+/%_-]{20,}={0,2})",
    "token by its prefix": r"(?<![A-Za-z0-9])(?:hf_|npm_|xai-|gsk_|pplx-|fw_|r8_|dapi|dop_v1_|hvs\.|ntn_|lin_api_"
    r"|dckr_pat_|pypi-|tvly-|nvapi-|phc_|sntrys_|shpat_|rk-|AKC|gl(?:pat|dt|rt|ptt|cbt|ft)-|GOCSPX-|do[or]_v1_|glsa_"
    r"|pcsk_|rpa_|wandb_v1_|AT[AC]TT3|NRAK-)(?=[A-Za-z0-9_-]*\d|[A-Za-z]{30})"
    r"[A-Za-z0-9_-]{20,}",
    "bearer token": r"(?<![A-Za-z0-9])(?i:bearer|basic)\s+(?P<bearer>(?=[A-Za-z._~+/=-]*\d|[A-Za-z]{24})"
    r"[A-Za-z0-9._~+/=-]{16,})",
    "password in a URL": r"(?<=://)(?:[^\s/:@\"']{0,100}:(?P<url>[^\s/@\"'\[]{1,200})|(?P<dsn>[0-9a-f]{32}))@",
    "webhook": r"(?i:discord(?:app)?\.com/api/webhooks|hooks\.slack\.com/services|webhook\.office\.com)/"
    r"(?P<hook>[\w/@.-]{20,})",
    "value of a secret's name": r"(?:(?<![a-z])"
    + r"(?:KEY|TOKEN|PASS(?:WORD|WD|PHRASE)?|COOKIE|_PWD|_PAT|SECRET|CREDENTIALS?)"
    + rf"(?:_[A-Z0-9]{{1,20}})?{_ASSIGNED}"
    + rf"""(?:[\\"'(]{{1,4}}(?P<quoted>[^\s\\"'][^\\"'\n]{{7,}})[\\"']|{_OPENED}(?P<upper>{_VALUE}))"""
    + rf"|(?i:passw(?:or)?d|passphrase){_ASSIGNED}{_OPENED}(?P<word>(?![\w.]*\()(?=\S*[a-z]){_VALUE})"
    + rf"|(?i:secret|token|api[_-]?key|(?:access|private|auth|account)[_-]?key){_ASSIGNED}{_OPENED}"
    + rf"""(?P<lower>(?=[^\s\\"'`,;]*[A-Za-z])(?=[^\s\\"'`,;]*\d){_VALUE}))""",
}
"""What is cut out of a line, by the name that it is counted under; a group is the part that goes where not all does."""
_KINDS = tuple(FORMS)
_FORMS = tuple(
    re.compile("|".join(f"(?P<k{place}>{FORMS[_KINDS[place]]})" for place in places))
    for places in (range(len(_KINDS) - 1), [len(_KINDS) - 1])  # the last one after the others: KEY=sk-... is a key
)
_PARTS = ("aws", "azure", "bearer", "url", "dsn", "hook", "quoted", "upper", "word", "lower")
PRIVATE_KEY = "private key"
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:(?s:.){0,10000}?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
    r"|(?:\\+[nr]|[A-Za-z0-9+/=\s])*)|Private-Lines: \d+(?:\s+[A-Za-z0-9+/=]{8,}){1,100}"
)
_NAMED = re.compile(r"(?i:pass|pwd|secret|key|contrase)[^\n]*[\"'`]|[\"'`][^\n]*(?i:pass|pwd|secret|key|contrase)")
_HINT = re.compile(r"[\w+/=.~-]{16}|://|(?i:pass|pwd|secret|token|key|credential|contrase|cookie|_pat)")
"""Lines without it hold no secret that we know: most of a log's and of code's."""
DETECTED = "by detect-secrets"
_OTHER_PLUGINS = ("high_entropy_strings", "ip_public", "keyword", "private_key", "base")
"""Entropy rules hit hashes, addresses are no secrets, and of a private key one plugin knows the first line alone."""


class Redactor:
    """Cuts secrets out of a stream of bytes, wherever its chunks end, and out of whole texts.

    They are the given values, and what has a secret's form. A stream's control characters are spelled, but for tabs and
    the ends of lines.
    """

    def __init__(self, values: Iterable[str]) -> None:
        self._texts = sorted({form for value in values for form in secret_forms(value)}, key=len, reverse=True)
        self._forms = sorted((_bytes(form) for form in self._texts), key=len, reverse=True)
        self._hidden = HIDDEN.encode()
        self._held = self._line = b""

    def feed(self, data: bytes) -> bytes:
        """What may be shown after `data` came: whole lines, and none that may still become part of a secret."""
        self._line += self._past_values(data)
        cut = self._line.rfind(b"\n") + 1
        key = self._line.rfind(b"-----BEGIN ")
        if key >= 0 and self._line[key:cut].count(b"PRIVATE KEY") == 1:  # its end is still to come
            cut = key
        if len(self._line) - cut > _MAX_LINE_BYTES:  # not within a word, which may be a secret
            cut = len(self._line) - len(_LAST_WORD.search(self._line[-4096:])[0])  # pyright: ignore
        shown, self._line = self._line[:cut], self._line[cut:]
        return _shown(shown)

    def flush(self) -> bytes:
        """What was held back, at the stream's end."""
        held, self._held = self._held, b""
        line, self._line = self._line + self._without(held), b""
        return _shown(line)

    def _past_values(self, data: bytes) -> bytes:
        """Without the values; an end that could still become one, or a longer one, is held."""
        text = self._held + data
        cut = len(text) - max((_overlap(text, form) for form in self._forms), default=0)
        while (start := self._spanning(text, cut)) is not None:
            cut = start
        self._held = text[cut:]
        return self._without(text[:cut])

    def text(self, text: str) -> str:
        """A whole text without secrets."""
        return cut_forms(self.values(text))

    def values(self, text: str) -> str:
        """A whole text without the values."""
        for form in self._texts:
            text = text.replace(form, HIDDEN)
        return text

    def data(self, data: Any) -> Any:
        """What JSON can say, with secrets cut out of its texts. Numbers and the names of fields stay."""
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, dict):
            return {
                name: HIDDEN if isinstance(value, str) and names_secret(name, value) else self.data(value)
                for name, value in data.items()
            }
        return [self.data(value) for value in data] if isinstance(data, (list, tuple)) else data

    def _without(self, text: bytes) -> bytes:
        for form in self._forms:
            text = text.replace(form, self._hidden)
        return text

    def _spanning(self, text: bytes, cut: int) -> int | None:
        """Where a whole secret begins that a cut at `cut` would tear."""
        for form in self._forms:
            found = text.find(form, max(0, cut - len(form) + 1), cut + len(form) - 1)
            if 0 <= found < cut:
                return found
        return None


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """The values in an environment that must not be shown.

    They are those of variables that it names as secret or that are named like secrets, URLs with credentials, and keys
    in connection strings.
    """
    named = environment.get(SECRET_NAMES_VARIABLE, "").split(",")
    values = hidden_values({name: environment[name] for name in named if environment.get(name)})
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and name != SECRET_NAMES_VARIABLE and len(value) >= MIN_GUESSED_LENGTH:
            values += hidden_values({name: value})
        elif (found := _CREDENTIALS.search(value)) is not None:
            values += [value, found[1]]
    return values


def names_secret(name: str, value: str) -> bool:
    """Whether a field's name says that its value is a secret, as it would in `NAME="value"` on a line."""
    if len(value) < MIN_GUESSED_LENGTH or _HINT.search(name) is None or HIDDEN in value:
        return False
    line = f'{name}="{_NO_PLAIN_VALUE.sub("0", value.strip().partition(chr(10))[0])}"'
    return _FORMS[-1].search(line) is not None


def cut_forms(text: str, note: Callable[[str], object] = lambda kind: None) -> str:
    """A text without what has the form of a secret; `note` is told the kind of each."""
    text, keys = _PRIVATE_KEY.subn(HIDDEN, text)
    for _ in range(keys):
        note(PRIVATE_KEY)
    lines = text.split("\n")
    for place, line in enumerate(lines):
        if _HINT.search(line) is not None:
            lines[place] = _cut_detected(_cut_known(line, note), note)
    return "\n".join(lines)


def _cut_known(line: str, note: Callable[[str], object]) -> str:
    def hide(match: re.Match[str]) -> str:
        found = {name for name, text in match.groupdict().items() if text is not None}
        note(next(kind for place, kind in enumerate(_KINDS) if f"k{place}" in found))
        return _cut(match, next((part for part in _PARTS if part in found), 0))

    for form in _FORMS:
        while (cut := form.sub(hide, line)) != line:
            line = cut
    return line


def _cut(match: re.Match[str], part: str | int) -> str:
    start, end = (edge - match.start() for edge in match.span(part))
    return match.group()[:start] + HIDDEN + match.group()[end:]


_detectors: tuple[list[re.Pattern[str]], list[re.Pattern[str]]] | None = None


def _cut_detected(line: str, note: Callable[[str], object]) -> str:
    """What the forms of detect-secrets find; nothing where the library isn't installed."""

    def hide(match: re.Match[str]) -> str:
        groups = [group for group in range(1, match.re.groups + 1) if match.group(group) is not None]
        part = max(groups, key=lambda group: len(match.group(group)), default=0)
        if len(match.group(part)) < MIN_GUESSED_LENGTH or HIDDEN in match.group(part):
            return match.group()
        note(DETECTED)
        return _cut(match, part)

    forms, named = _detected_forms()
    for form in (*forms, *(named if _NAMED.search(line) is not None else ())):
        line = form.sub(hide, line)
    return line


def leave_library_out() -> None:
    """From now on know the core's forms alone: importing while Python reports Ctrl-C would change its exit code."""
    global _detectors
    _detectors = [], []


def _detected_forms() -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    global _detectors
    if _detectors is None:
        try:
            _detectors = _read_plugins()
        except ImportError:
            _detectors = [], []
    return _detectors


def _read_plugins() -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """The forms of the library's plugins; apart, since they are slow, of quoted values beside a word for secrets."""
    import importlib
    import pkgutil

    from detect_secrets import plugins
    from detect_secrets.plugins.base import RegexBasedDetector
    from detect_secrets.plugins.keyword import QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP

    found = []
    for module in pkgutil.iter_modules(plugins.__path__):
        if module.name not in _OTHER_PLUGINS:
            held = vars(importlib.import_module(f"{plugins.__name__}.{module.name}")).values()
            for one in held:
                if isinstance(one, type) and issubclass(one, RegexBasedDetector) and one is not RegexBasedDetector:
                    found += list(one.denylist)  # pyright: ignore[reportArgumentType] (an abstract property there)
    return found, list(QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP)


def _shown(data: bytes) -> bytes:
    text = cut_forms(data.decode("utf-8", "surrogateescape"))
    return _bytes(_CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text))


def hidden_values(secrets: Mapping[str, str]) -> list[str]:
    """Of variables that were given as secrets, the values that must not be shown."""
    return [value for name, value in secrets.items() if name not in SHOWN]


def secret_forms(value: str) -> list[str]:
    """The spellings of a secret value that are cut out: as it is, line by line, as part of a URL, and as JSON and
    Python write it, also one inside the other."""
    if len(value) < MIN_SECRET_LENGTH:
        return []
    from urllib.parse import quote

    lines = [line.strip() for line in value.splitlines() if len(line.strip()) >= MIN_SECRET_LINE_LENGTH]
    in_url = quote(value, safe="", errors="surrogateescape")
    spellings = {value, *lines, value.strip()}
    for _ in range(3):
        for form in tuple(spellings):
            spellings |= {json.dumps(form)[1:-1], json.dumps(form, ensure_ascii=False)[1:-1]}
            spellings |= {repr(form)[1:-1], repr("\"'" + form)[4:-1]}  # beside both quotes it escapes one
    spellings.add(in_url)
    return [spelling for spelling in spellings if len(spelling) >= MIN_SECRET_LENGTH]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _overlap(text: bytes, form: bytes) -> int:
    """Length of the longest end of `text` that is a beginning of `form`, but not all of it."""
    for length in range(min(len(text), len(form) - 1), 0, -1):
        if text.endswith(form[:length]):
            return length
    return 0


def main() -> int:
    """Pass standard input on to its end. What is asked to end meanwhile waits for it: the writers are told, not we."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    redactor = Redactor(secret_values(os.environ))
    while True:
        data = os.read(0, _CHUNK_BYTES)
        shown = redactor.feed(data) if data else redactor.flush()
        while shown:
            shown = shown[os.write(1, shown) :]
        if not data:
            return 0


if __name__ == "__main__":
    sys.exit(main())
