"""Cuts secret values out of what a site writes: its jobs' output, its processes' log files, its tapes.

One file, standard library only, Python 3.9 or later: it is copied to machines that have nothing of ours. Run as
`python3 redaction.py`, it passes standard input on to standard output without the secrets of its environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping

TYPE_CHECKING = False  # as typing has it, which takes as long to import as all of this
if TYPE_CHECKING:
    from typing import Any

SECRET_NAMES_VARIABLE = "COMPOSER_PRIME_SECRETS"
"""Names, with commas, the variables whose values a site must keep out of what it writes."""
KNOWN_SECRETS = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY",
    "MODAL_TOKEN_SECRET", "OPENAI_API_KEY", "ANTHROPIC_API_KEY",
)  # fmt: skip
"""Variables that are secret wherever they are set, named or not."""
SHOWN = ("AWS_ACCESS_KEY_ID",)
"""Variables that go the way of secrets and are none: a key's id is a name, and may well be an everyday word."""

HIDDEN = "[redacted]"
MIN_SECRET_LENGTH = 6
"""Shorter values are words like any other: cutting "1" out of a log would leave no log."""
MIN_SECRET_LINE_LENGTH = 16
"""Of a value of several lines, those so long are cut out alone too: logs put things between lines."""

_CHUNK_BYTES = 1 << 16


class Redactor:
    """Cuts secret values out of a stream of bytes, wherever its chunks end, and out of whole texts."""

    def __init__(self, values: Iterable[str]) -> None:
        self._texts = sorted({form for value in values for form in secret_forms(value)}, key=len, reverse=True)
        self._forms = sorted((_bytes(form) for form in self._texts), key=len, reverse=True)
        self._hidden = HIDDEN.encode()
        self._held = b""

    @property
    def has_secrets(self) -> bool:
        """Whether there is anything to cut out."""
        return bool(self._forms)

    def feed(self, data: bytes) -> bytes:
        """What may be shown after `data` came; an end that could still become a secret, or a longer one, is held."""
        text = self._held + data
        cut = len(text) - max((_overlap(text, form) for form in self._forms), default=0)
        while (start := self._spanning(text, cut)) is not None:
            cut = start
        self._held = text[cut:]
        return self._without(text[:cut])

    def flush(self) -> bytes:
        """What was held back, at the stream's end."""
        held, self._held = self._held, b""
        return self._without(held)

    def text(self, text: str) -> str:
        """A whole text without the values."""
        for form in self._texts:
            text = text.replace(form, HIDDEN)
        return text

    def data(self, data: Any) -> Any:
        """What JSON can say, with the values cut out of its texts. Numbers and the names of fields stay."""
        if not self._texts:
            return data
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, dict):
            return {name: self.data(value) for name, value in data.items()}
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
    """The values in an environment that must not be shown: of variables that it names as secret, and of known ones."""
    names = [*environment.get(SECRET_NAMES_VARIABLE, "").split(","), *KNOWN_SECRETS]
    return hidden_values({name: environment[name] for name in names if environment.get(name)})


def hidden_values(secrets: Mapping[str, str]) -> list[str]:
    """Of variables that were given as secrets, the values that must not be shown."""
    return [value for name, value in secrets.items() if name not in SHOWN]


def secret_forms(value: str) -> list[str]:
    """The spellings of a secret value that are cut out: as it is, line by line, as JSON and as part of a URL."""
    if len(value) < MIN_SECRET_LENGTH:
        return []
    from urllib.parse import quote

    lines = [line.strip() for line in value.splitlines() if len(line.strip()) >= MIN_SECRET_LINE_LENGTH]
    in_url = quote(value, safe="", errors="surrogateescape")
    spellings = {value, *lines, value.strip(), json.dumps(value)[1:-1], in_url}
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
