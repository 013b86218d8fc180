"""Langfuse's exports: a trace with its observations, a list of observations, or one a line. Records are these."""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.formats.exchanges import (
    Exchange,
    action_of,
    listed_tools,
    loaded,
    messages_of,
    read_calls,
)
from composer_prime.traces.ingest.messages import tools_of
from composer_prime.traces.ingest.reading import Reading
from composer_prime.traces.ingest.records import Part, mapping, name_or_none, objects, sequence

NAME = "langfuse"
NO_GENERATION = "observation that is no generation"
NO_TEXT = "generation without its messages or its answer"
TYPES = ("GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EMBEDDING", "EVALUATOR", "GUARDRAIL")


def lacks(value: Any) -> list[str]:
    """What a JSON value lacks to hold Langfuse's observations."""
    observations = objects(_observations(value))
    checks = {
        f"observations of type {', '.join(TYPES[:3])}, ...": any(one.get("type") in TYPES for one in observations),
        "startTime": any("startTime" in one for one in observations),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """One session for each list of tools that the file's generations have."""
    return read_calls(NAME, parts, lacks, _observations, _exchange)


def _observations(value: Any) -> Sequence[Any]:
    given = mapping(value)
    value = given.get("observations", given.get("data", value))
    return value if isinstance(value, list) else [value]


def _exchange(given: Mapping[str, Any]) -> Exchange | str:
    if given.get("type") != "GENERATION":
        return NO_GENERATION
    asked, answered = loaded(given.get("input")), loaded(given.get("output"))
    action, messages = action_of(answered), messages_of(asked)
    if action is None or not messages:
        return NO_TEXT
    listed = loaded(given.get("toolDefinitions")) or listed_tools(mapping(asked))
    tools = [loaded(tool) for tool in sequence(listed)]
    usage = mapping(given.get("usageDetails")) or mapping(given.get("usage")) or None
    author = name_or_none(given.get("model"), mapping(answered).get("model"))
    return Exchange(messages, action, tools_of(tools), author, usage, name_or_none(mapping(answered).get("id")))
