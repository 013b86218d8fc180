"""verifiers: traces, and episodes of several, also as PRIME-RL writes them to traces.jsonl. Records are the nodes.

A trace is a tree already. Per-token numbers on disk are rounded and are not read here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.messages import chat_message, tools_of
from composer_prime.traces.ingest.reading import BROKEN_PARENT, Document, Documents, parents_first
from composer_prime.traces.ingest.records import mapping, name_or_none, number_or_none, objects, sequence
from composer_prime.traces.ingest.session import Draft

NO_TRACE = "episode without a trace"
NO_MESSAGE = "node without a message"


def _marks(value: Any) -> dict[str, bool]:
    given = mapping(value)
    is_trace = isinstance(given.get("nodes"), list)
    is_episode = isinstance(given.get("traces"), list) or ("env" in given and "task" in given)
    return {"nodes (of a trace) or traces (of an episode)": is_trace or is_episode}


def _read(value: Mapping[str, Any]) -> Document:
    document = Document([])
    for trace in [value] if "nodes" in value else sequence(value.get("traces")) or [value]:
        nodes = sequence(mapping(trace).get("nodes"))
        if nodes:
            document.drafts.append(_trace(document, mapping(trace), nodes))
        else:
            document.fates[len(document.items)] = NO_TRACE
        document.items += nodes or [trace]
    return document


def _trace(document: Document, trace: Mapping[str, Any], nodes: Sequence[Any]) -> Draft:
    draft = Draft(name_or_none(trace.get("id")), tools=tools_of(trace.get("tools")), reward=_reward(trace))
    config = mapping(mapping(trace.get("agent")).get("config"))
    calls = {call["node"]: call for call in objects(sequence(trace.get("calls"))) if type(call.get("node")) is int}
    places: dict[int | None, int | None] = {None: None}
    start = len(document.items)
    named = (mapping(node).get("parent") for node in nodes)
    parents = [parent if parent is None or type(parent) is int else -1 for parent in named]
    for number in parents_first(range(len(nodes)), parents):
        given = mapping(nodes[number])
        message = chat_message(given.get("message"))
        if message is None or parents[number] not in places:
            document.fates[start + number] = NO_MESSAGE if parents[number] in places else BROKEN_PARENT
            continue
        call = mapping(calls.get(number))
        wrote = given.get("sampled") is True
        author = name_or_none(call.get("model"), config.get("model")) if wrote else None
        more = {"author": author, "usage": mapping(call.get("usage")) or None}
        is_copied = message["role"] == "assistant" and not wrote
        places[number] = draft.add(message, places[parents[number]], [start + number], is_copied=is_copied, **more)
        if not draft.tools:
            draft.tools += tools_of(given.get("tools"))
    return draft


def _reward(trace: Mapping[str, Any]) -> float | None:
    """The sum of the rewards that there are, each by its weight."""
    given = objects(mapping(trace.get("rewards")).values())
    scored = [(number_or_none(one.get("score")), number_or_none(one.get("weight", 1.0))) for one in given]
    parts = [score * weight for score, weight in scored if score is not None and weight is not None]
    return number_or_none(sum(parts)) if parts else None


FORMAT = Documents("verifiers", _marks, _read)
