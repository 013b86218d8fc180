"""Secrets in traces, counted by kind (redaction.py knows them).

They are cut out of the texts inside JSON, before anything is written: a record stays the JSON that it was, and what has
been cut once stays as it is.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping

from composer_prime.redaction import HIDDEN, MIN_SECRET_LENGTH, Redactor, cut_forms, names_secret, secret_values

ENVIRONMENT = "value of the environment"
_FIELD = re.compile(r'"([^"\\]{3,64})"(\s*:\s*)("[^"\\]*+(?:\\.[^"\\]*+)*+")')
_LITERAL = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"')


class SecretCutter:
    """Cuts secrets out of JSON texts; `counts` says how many of each kind it has cut."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._values = Redactor(secret_values(environment))
        self.counts: Counter[str] = Counter()

    def json(self, text: str) -> str:
        """A JSON text, or a piece of one, whose strings hold no secret. A string without one stays as it is spelled."""
        return _LITERAL.sub(self._literal, _FIELD.sub(self._field, text))

    def _field(self, match: re.Match[str]) -> str:
        name, between, spelled = match.groups()
        if not names_secret(name, spelled[1:-1]):
            return match.group()
        self.counts["value of a secret's name"] += 1
        return f'"{name}"{between}{json.dumps(HIDDEN)}'

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
        left = self._values.values(text)
        if left != text:
            self.counts[ENVIRONMENT] += left.count(HIDDEN) - text.count(HIDDEN)
        return cut_forms(left, lambda kind: self.counts.update({kind: 1}))
