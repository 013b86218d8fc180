"""What a gateway and its clients agree on: paths, what a request's signature covers, and tickets for the bucket itself.

Both ends import this module, and nothing else of each other's.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_prime.errors import StoreError
from composer_prime.sync.signatures import SigningKey

PROTOCOL = "composer-prime-gateway/1"
CLOCK_WINDOW_S = 300
"""Farthest that a request's time may lie from the gateway's clock."""
INLINE_BYTES = 2**18
"""Up to here an object's bytes go to the gateway; larger ones go to the bucket by a ticket."""
SPAN_BYTES = 2**24
"""The most that one answer of a gateway holds; larger objects, where no ticket leads to them, take several."""
NOT_ADMITTED = "not admitted"
"""The code of the answer that says: the run doesn't let this key in, or not any more. Another try won't help."""
REVOKED = "revoked"
"""The code of the answer that says: the run's owner has taken this key out of the run. Its text is for the person."""
NONCE_BYTES = 12

OBJECTS, TICKETS, KEYS, SITE = "objects", "tickets", "keys", "site"
"""What stands behind the run's name in a path: an object, a ticket for one, the listing, who is asking."""

KEY_HEADER = "x-composer-key"
TIME_HEADER = "x-composer-time"
NONCE_HEADER = "x-composer-nonce"
BODY_HEADER = "x-composer-body"
SIGNATURE_HEADER = "x-composer-signature"

MISSING = "missing"
"""The code of the answer that says: no object at that key."""


@dataclass(frozen=True)
class Ticket:
    """Where an object's bytes are to be fetched from or sent to. `url` None: to the gateway itself.

    A URL is as good as the credentials behind it, for one object and a short time: it has no text form.
    """

    url: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    """That the request must have, with these values."""

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {"url": self.url, "headers": dict(self.headers)}

    @classmethod
    def from_bytes(cls, data: bytes) -> "Ticket":
        """Parse what `to_json` gave. Raises StoreError when it is something else: no gateway answered."""
        try:
            found = json.loads(data)
            url, headers = found["url"], {str(name): str(value) for name, value in found["headers"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"the gateway's ticket can't be read ({error!r}): it runs another version") from error
        if url is not None and not (isinstance(url, str) and url.startswith(("https://", "http://"))):
            raise StoreError("the gateway's ticket names no http(s) URL: it runs another version")
        return cls(url, headers)


def message(method: str, run: str, target: str, body: str, time_s: str, nonce: str) -> bytes:
    """What a request's signature covers.

    target   the path below the run's name, and the query if there is one, as they are sent
    body     its sha256, hex
    time_s   seconds since 1970, as `TIME_HEADER` spells them
    nonce    drawn for this request
    """
    return "\n".join((PROTOCOL, method, run, target, body, time_s, nonce)).encode()


def signed_headers(
    key: SigningKey,
    method: str,
    run: str,
    target: str,
    body: bytes | memoryview,
    *,
    time_s: int | None = None,
    nonce: str = "",
) -> dict[str, str]:
    """The headers by which a gateway knows who asks, for what, and when (None: now)."""
    stated, at = hashlib.sha256(body).hexdigest(), str(int(time.time()) if time_s is None else time_s)
    nonce = nonce or secrets.token_hex(NONCE_BYTES)
    return {
        KEY_HEADER: key.public,
        TIME_HEADER: at,
        NONCE_HEADER: nonce,
        BODY_HEADER: stated,
        SIGNATURE_HEADER: key.sign(message(method, run, target, stated, at, nonce)),
    }
