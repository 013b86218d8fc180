"""OpenTelemetry's spans of model calls, in three spellings: GenAI's, OpenLLMetry's and OpenInference's, and Vercel's.

A span, a list of them, an exporter's `resourceSpans`, or lines of any of these. Records are the spans.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.dialects.exchanges import Calls, Exchange, action_of, loaded, said
from composer_prime.traces.ingest.messages import json_text, plain, tools_of
from composer_prime.traces.ingest.records import each, mapping, name_or_none, objects, sequence
from composer_prime.traces.states import Message

NO_CALL = "span that is no call of a model"
NO_TEXT = "call of a model without its messages"
NOT_WHOLE = "call of a model whose prompt isn't whole"
_INPUTS = ("gen_ai.input.messages", "gen_ai.prompt", "llm.input_messages", "ai.prompt.messages")
_OUTPUTS = ("gen_ai.output.messages", "gen_ai.completion", "llm.output_messages")
_TOOLS = ("gen_ai.tool.definitions", "llm.tools", "llm.request.functions", "ai.prompt.tools")
_NUMBERED = re.compile(rf"({'|'.join(map(re.escape, (*_INPUTS, *_OUTPUTS, *_TOOLS)))})\.(\d+(?:\..*)?)")
_MARKS = re.compile(r"gen_ai\.|llm\.|openinference\.|ai\.(prompt|response)")


def _marks(value: Any) -> dict[str, bool]:
    marked = any(_MARKS.match(name) for span in _spans(value) for name in attributes_of(span))
    return {"spans with attributes gen_ai.* or llm.*": marked}


def _spans(value: Any) -> list[Mapping[str, Any]]:
    """The spans below any of an exporter's levels."""
    found = []
    for given in objects(each(value)):
        levels = ("resourceSpans", "scopeSpans", "instrumentationLibrarySpans", "spans")
        inner = next((given[name] for name in levels if isinstance(given.get(name), list)), None)
        if inner is not None:
            found += _spans(inner)
        elif "attributes" in given:
            found.append(given)
    return found


def attributes_of(span: Mapping[str, Any]) -> dict[str, Any]:
    """A span's attributes, of OTLP's list of keys with typed values, too."""
    given = span.get("attributes")
    if isinstance(given, dict):
        return dict(given)
    return {str(pair.get("key")): _value(pair.get("value")) for pair in objects(sequence(given))}


def _value(value: Any) -> Any:
    given = mapping(value)
    if "arrayValue" in given or "values" in given:
        return [_value(one) for one in sequence(mapping(given.get("arrayValue", given)).get("values"))]
    if "kvlistValue" in given:
        return {str(pair.get("key")): _value(pair.get("value")) for pair in objects(given["kvlistValue"].get("values"))}
    return next(iter(given.values()), None) if len(given) == 1 else value


def _exchange(span: Mapping[str, Any]) -> Exchange | str:
    given = _nested(attributes_of(span))
    if "ai.operationId" in given and ".do" not in str(given["ai.operationId"]):
        return NO_CALL  # Vercel's span of the whole, beside those of its calls
    outputs = next((given[name] for name in _OUTPUTS if name in given), _vercel(given))
    inputs = next((given[name] for name in _INPUTS if name in given), None)
    if inputs is None and outputs is None:
        return NO_CALL
    action = action_of([outputs] if isinstance(outputs, dict) else outputs)
    if action is None or inputs is None:
        return NO_TEXT
    messages = [*_system(given), *said(inputs)]
    if _is_cut(messages):
        return NOT_WHOLE
    tools = next((_listed(given[name]) for name in _TOOLS if name in given), [])
    models = (given.get(name) for name in ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name"))
    usage = {name.rpartition(".")[2]: count for name, count in given.items() if name.startswith("gen_ai.usage.")}
    call = name_or_none(given.get("gen_ai.response.id"), span.get("spanId"))
    return Exchange(messages, action, tools_of(tools), name_or_none(*models), usage or None, call)


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes with JSON texts parsed, and those that are numbered (`x.0.role`) as lists of objects."""
    found: dict[str, Any] = {}
    trees: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        numbered = _NUMBERED.fullmatch(name)
        if numbered is None:
            found[name] = loaded(value) if isinstance(value, str) and value[:1] in '[{"' else value
            continue
        head, *steps, last = numbered[1], *numbered[2].split(".")
        at = trees.setdefault(head, {})
        for step in steps:
            at = inner if isinstance(inner := at.setdefault(step, {}), dict) else {}
        at[last] = value
    return found | {head: _lists(tree) for head, tree in trees.items()}


def _lists(tree: Any) -> Any:
    """Objects whose names are all numbers as lists; OpenInference's wrappers of one object left out."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(name.isdigit() for name in tree):
        return [_lists(tree[name]) for name in sorted(tree, key=int)]
    if len(tree) == 1 and next(iter(tree)) in ("message", "tool_call", "message_content"):
        return _lists(next(iter(tree.values())))
    found = {name: _lists(inner) for name, inner in tree.items()}
    return {"content": found.pop("contents"), **found} if "contents" in found else found


def _vercel(given: Mapping[str, Any]) -> list[Any] | None:
    texts = (given.get("ai.response.text"), given.get("ai.response.object"))
    content = [{"type": "text", "text": json_text(text)} for text in texts if text]
    content += [{"type": "tool-call", **mapping(call)} for call in sequence(given.get("ai.response.toolCalls"))]
    return [{"role": "assistant", "content": content}] if content else None


def _system(given: Mapping[str, Any]) -> list[Message]:
    told = given.get("gen_ai.system_instructions")
    nested = [part for item in objects(sequence(told)) for part in sequence(item.get("parts", [item]))]
    return [plain("system", nested or told)] if told else []


def _listed(tools: Any) -> list[Mapping[str, Any]]:
    """Tool definitions, each of which may be JSON text, or lie below another name."""
    found = []
    for tool in map(loaded, sequence(tools)):
        for name in ("tool", "json_schema"):
            tool = loaded(mapping(tool).get(name, tool))
        found.append({**mapping(tool), "parameters": loaded(mapping(tool).get("parameters"))})
    return found


def _is_cut(messages: Sequence[Message]) -> bool:
    """Whether a result stands in a prompt whose call doesn't."""
    called = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    return any(message["role"] == "tool" and message["tool_call_id"] not in called for message in messages)


FORMAT = Calls("otel-spans", _marks, _spans, _exchange)
