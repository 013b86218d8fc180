"""A site's tape in the bucket: what happened, as JSON lines, appended by new objects only.

Events are small dicts with an "event" name; anyone with the bucket can read what became of every token. So no event
holds a secret of the process that wrote it.
"""

import json
import os
import threading
from collections.abc import Mapping
from typing import Any

from composer_prime.redaction import Redactor, secret_values
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex


class Tape:
    """Buffers events and writes them out as the next numbered object. Thread-safe.

    environment   whose secrets are cut out of every text in an event
    """

    def __init__(self, store: Store, site: str, incarnation: int, environment: Mapping[str, str] = os.environ) -> None:
        self._store = store
        self._site = site
        self._incarnation = incarnation
        self._redactor = Redactor(secret_values(environment))
        self._lines: list[str] = []
        self._unsure = b""
        """Bytes of an object that may have been written, or not."""
        self._lock = threading.Lock()
        self._number = len(store.list(keys.tape_prefix(site)))

    def write(self, event: str, **fields: Any) -> None:
        """Add one event; fields must be JSON-able. It reaches the bucket at the next flush."""
        shown = self._redactor.data(fields)
        line = json.dumps(
            {"event": event, "site": self._site, "incarnation": self._incarnation, **shown}, sort_keys=True
        )
        with self._lock:
            self._lines.append(line)

    def flush(self) -> None:
        """Write what is buffered as a new object. Another process of the name may write one of the same number.

        What a failed flush may have written is written again first, byte for byte, so that no event stands twice.
        """
        while data := self._next():
            self._store.create(keys.tape(self._site, self._number, sha256_hex(data)), data)
            with self._lock:
                if self._unsure is data:  # else another thread, which waits no more for this one, has written it too
                    self._number, self._unsure = self._number + 1, b""

    def _next(self) -> bytes:
        """What is to be written next; empty when nothing is."""
        with self._lock:
            if not self._unsure and self._lines:
                self._unsure = ("\n".join(self._lines) + "\n").encode()
                self._lines = []
            return self._unsure
