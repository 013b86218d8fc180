"""Secrets in traces: keys and passwords by their well-known forms, and the values of this environment's secrets.

They are cut out of the texts inside JSON, before anything is written: a record stays the JSON that it was, and what has
been cut once stays as it is.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping

from composer_prime.redaction import HIDDEN, MIN_SECRET_LENGTH, Redactor, secret_values

PATTERNS: Mapping[str, str] = {
    "Anthropic key": r"(?<![A-Za-z0-9])sk-ant-[A-Za-z0-9_-]{20,}",
    "OpenAI key": r"(?<![A-Za-z0-9])sk-(?:proj-|svcacct-|admin-)?(?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{20,}",
    "Hugging Face token": r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}",
    "GitHub token": r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "AWS key": r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    "AWS secret key": r"(?i:aws_?secret_?access_?key)\W{1,6}(?P<aws>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])",
    "Google key": r"(?<![A-Za-z0-9])(?:AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,})",
    "Slack token": r"(?<![A-Za-z0-9])xox[abeoprs]-[A-Za-z0-9-]{10,}",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?s:.){0,10000}?-----END [A-Z ]*PRIVATE KEY-----"
    r"|(?:\\+[nr]|[A-Za-z0-9+/=\s])*)",
    "bearer token": r"(?<![A-Za-z0-9])(?i:bearer)\s+(?P<bearer>[A-Za-z0-9._~+/=-]{16,})",
    "password in a URL": r"(?<=://)[^\s/:@\"']{0,100}:(?P<url>[^\s/@\"'\[]{1,200})@",
}
"""What is cut out, by the name that it is counted under; a group is the part that goes where not all does."""

ENVIRONMENT = "value of the environment"
_KINDS = tuple(PATTERNS)
_FORM = re.compile("|".join(f"(?P<k{place}>{pattern})" for place, pattern in enumerate(PATTERNS.values())))
_PARTS = ("aws", "bearer", "url")
_LITERAL = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"')


class SecretCutter:
    """Cuts secrets out of JSON texts; `counts` says how many of each kind it has cut."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._values = Redactor(secret_values(environment))
        self.counts: Counter[str] = Counter()

    def json(self, text: str) -> str:
        """A JSON text, or a piece of one, whose strings hold no secret. A string without one stays as it is spelled."""
        return _LITERAL.sub(self._literal, text)

    def _literal(self, match: re.Match[str]) -> str:
        spelled = match.group()
        if len(spelled) < MIN_SECRET_LENGTH + 2:  # most strings of a log are names of fields
            return spelled
        try:
            plain = json.loads(spelled) if "\\" in spelled else spelled[1:-1]
        except ValueError:  # no JSON: the record will be dropped
            return spelled
        cut = self.text(plain)
        return spelled if cut == plain else json.dumps(cut)

    def text(self, text: str) -> str:
        """The text without secrets. What stood hidden beside a cut is cut in the next pass."""
        left = self._values.text(text)
        if left != text:
            self.counts[ENVIRONMENT] += left.count(HIDDEN) - text.count(HIDDEN)
        while (cut := _FORM.sub(self._hide, left)) != left:
            left = cut
        return left

    def _hide(self, match: re.Match[str]) -> str:
        for place, kind in enumerate(_KINDS):
            if match.group(f"k{place}") is not None:
                self.counts[kind] += 1
        for part in _PARTS:
            if match.group(part) is not None:
                start, end = (edge - match.start() for edge in match.span(part))
                return match.group()[:start] + HIDDEN + match.group()[end:]
        return HIDDEN
