"""A streamed response put together: the events of Anthropic's messages, OpenAI's chat completions and Responses."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.records import mapping, objects, parse, sequence, string


def events_of(text: str) -> list[Mapping[str, Any]]:
    """The events of a server-sent stream, or of JSON lines; what is none of them is left out."""
    found = []
    for line in text.splitlines():
        try:
            found.append(parse(line.removeprefix("data:")))
        except (ValueError, RecursionError):
            continue
    return objects(found)


def assembled(events: Sequence[Any]) -> Mapping[str, Any]:
    """The response that a stream's events make up; empty where they are in no known dialect."""
    given = objects(events)
    if any("choices" in event for event in given):
        return _chat(given)
    if any(event.get("type") == "message_start" for event in given):
        return _anthropic(given)
    return _responses(given)


def _anthropic(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    message: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    inputs: dict[Any, str] = {}
    for event in events:
        kind, place, delta = event.get("type"), str(event.get("index")), mapping(event.get("delta"))
        if kind == "message_start":
            message |= mapping(event.get("message"))
        elif kind == "content_block_start":
            blocks[place] = dict(mapping(event.get("content_block")))
        elif kind == "content_block_delta" and place in blocks:
            for name in ("text", "thinking"):
                if name in delta:
                    blocks[place][name] = string(blocks[place].get(name)) + string(delta[name])
            inputs[place] = inputs.get(place, "") + string(delta.get("partial_json"))
        elif kind == "message_delta":
            message["usage"] = {**mapping(message.get("usage")), **mapping(event.get("usage"))}
    for place, text in inputs.items():
        if text and "input" in blocks[place]:
            blocks[place]["input"] = text
    return {**message, "content": list(blocks.values())}


def _chat(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first choice's message."""
    whole: dict[str, Any] = {}
    texts: dict[str, str] = {}
    calls: dict[Any, dict[str, str]] = {}
    for event in events:
        whole |= {name: value for name, value in event.items() if name != "choices" and value is not None}
        for choice in objects(sequence(event.get("choices"))):
            if choice.get("index", 0) != 0:
                continue
            delta = mapping(choice.get("delta"))
            for name in ("content", "reasoning_content", "reasoning"):
                texts[name] = texts.get(name, "") + string(delta.get(name))
            for piece in objects(sequence(delta.get("tool_calls"))):
                call = calls.setdefault(str(piece.get("index", len(calls))), {"id": "", "name": "", "arguments": ""})
                call["id"] = call["id"] or string(piece.get("id"))
                for name in ("name", "arguments"):
                    call[name] += string(mapping(piece.get("function")).get(name))
    message = {**texts, "role": "assistant", "tool_calls": list(calls.values())}
    return {**whole, "choices": [{"message": message}]}


def _responses(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The response that the last event holds, with the items that came before if it has none itself."""
    items, last = [], {}
    for event in events:
        if event.get("type") == "response.output_item.done":
            items.append(event.get("item"))
        elif string(event.get("type")).startswith("response.") and isinstance(event.get("response"), dict):
            last = event["response"]
    return {**last, "output": sequence(last.get("output")) or items} if last or items else {}
