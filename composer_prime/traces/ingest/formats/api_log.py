"""Logs of requests with their responses, as a proxy in front of a model's API writes them. Records are the calls.

One JSON object a call, or a list of them, with `request` and `response`, each as it was sent or below `body`.
"""

import json
from collections.abc import Sequence
from typing import Any

from composer_prime.traces.ingest.formats.exchanges import Exchange, add_exchanges, exchange_of
from composer_prime.traces.ingest.reading import Document, Reading, read_documents
from composer_prime.traces.ingest.records import Part, mapping, objects

NAME = "api-log"
NO_DIALECT = "call in a dialect that isn't read"


def lacks(value: Any) -> list[str]:
    """What a JSON value lacks to be a call, or a list of calls."""
    calls = objects(_calls(value))
    has_messages = any({"messages", "input"} & body(call.get("request")).keys() for call in calls)
    checks = {
        "a request with messages or input": has_messages,
        "a response beside the request": any("response" in call for call in calls),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """One session for each list of tools that the calls of a JSON value have."""
    return read_documents(NAME, parts, lacks, _read)


def _calls(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _read(value: Any) -> Document:
    document = Document(list(_calls(value)))
    add_exchanges(document, enumerate(document.items), _exchange)
    return document


def _exchange(call: Any) -> Exchange | str:
    given = mapping(call)
    return exchange_of(body(given.get("request")), body(given.get("response"))) or NO_DIALECT


def body(message: Any) -> dict[str, Any]:
    """A request's or a response's body, which may be JSON text, or lie below `body`."""
    if isinstance(message, str):
        try:
            message = json.loads(message)
        except (ValueError, RecursionError):
            return {}
    given = dict(mapping(message))
    return body(given["body"]) if "body" in given else given
