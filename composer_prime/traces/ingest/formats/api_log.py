"""Logs of requests with their responses: a proxy's, LiteLLM's, OpenEnv's, stored completions. Records are the calls.

A call is a JSON object, of a list, of an OpenEnv trace's `turns`, or a line of its own. It has a request and a
response: each as it was sent, as JSON text, as a stream's events or below `body`; or the request's messages beside the
response; or a completion of OpenAI's with the messages that it answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.dialects.exchanges import Calls, Exchange, exchange_of, loaded
from composer_prime.traces.ingest.dialects.streams import assembled
from composer_prime.traces.ingest.records import each, mapping, objects, sequence

NO_DIALECT = "call in a dialect that isn't read"
NO_REQUEST = "call without its messages"
FAILED = "call that failed"
PROBE = "call for one token"
REQUESTS = ("request", "request_body", "proxy_server_request")
RESPONSES = ("response", "response_body")
BODIES = ("body", "body_raw")


def _marks(value: Any) -> dict[str, bool]:
    calls = [_sides(call) for call in objects(_calls(value))]
    return {
        "a request with messages or input": any(_has_messages(request) for request, _ in calls),
        "a response beside the request": any(response is not None for _, response in calls),
    }


def _calls(value: Any) -> Sequence[Any]:
    given = mapping(value)
    return each(given.get("data" if given.get("object") == "list" else "turns", value))


def _exchange(call: Mapping[str, Any]) -> Exchange | str:
    request, response = _sides(call)
    if mapping(response).get("error") or mapping(response).get("type") == "error":
        return FAILED
    if request.get("max_tokens") == 1:
        return PROBE
    found = exchange_of(request, response) if isinstance(response, dict) else None
    if found is None:
        return NO_DIALECT
    return found if found.messages else NO_REQUEST


def _sides(call: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """A call's request and its response; None: it has none."""
    request = next((found for name in REQUESTS if _has_messages(found := mapping(body(call.get(name))))), None)
    response = next((body(call[name]) for name in RESPONSES if name in call), None)
    if response is None and "choices" in call:
        response = call
    if request is None:
        beside = {"messages": loaded(call["messages"])} if "messages" in call else {}
        request = {**call, **beside, "tools": call.get("tools", mapping(call.get("model_parameters")).get("tools"))}
    return request, response


def _has_messages(request: Mapping[str, Any]) -> bool:
    return bool({"messages", "input", "contents"} & request.keys())


def body(message: Any) -> Any:
    """A request's or a response's body, which may be JSON text, a stream's events, or lie below `body`."""
    found = loaded(message)
    if isinstance(found, list):
        return assembled(sequence(found))
    given = mapping(found)
    return next((body(given[name]) for name in BODIES if given.get(name)), found)


FORMAT = Calls("api-log", _marks, _calls, _exchange)
