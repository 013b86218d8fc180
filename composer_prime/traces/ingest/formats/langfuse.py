"""Langfuse's exports: a trace with its observations, a list of observations, or one a line. Records are these."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_prime.traces.ingest.dialects.exchanges import Calls, Exchange, exchange_of, loaded
from composer_prime.traces.ingest.messages import tools_of
from composer_prime.traces.ingest.records import each, mapping, name_or_none, objects, sequence

NO_GENERATION = "observation that is no generation"
NO_TEXT = "generation without its messages or its answer"
TYPES = ("GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EMBEDDING", "EVALUATOR", "GUARDRAIL")


def _marks(value: Any) -> dict[str, bool]:
    observations = objects(_observations(value))
    return {
        f"observations of type {', '.join(TYPES[:3])}, ...": any(one.get("type") in TYPES for one in observations),
        "startTime": any("startTime" in one for one in observations),
    }


def _observations(value: Any) -> Sequence[Any]:
    given = mapping(value)
    return each(given.get("observations", given.get("data", value)))


def _exchange(given: Mapping[str, Any]) -> Exchange | str:
    if given.get("type") != "GENERATION":
        return NO_GENERATION
    found = exchange_of(loaded(given.get("input")), loaded(given.get("output")))
    if found is None or not found.messages:
        return NO_TEXT
    tools = tools_of([loaded(tool) for tool in sequence(loaded(given.get("toolDefinitions")))]) or found.tools
    usage = mapping(given.get("usageDetails")) or mapping(given.get("usage")) or found.usage
    return replace(found, tools=tools, author=name_or_none(given.get("model"), found.author), usage=usage)


FORMAT = Calls("langfuse", _marks, _observations, _exchange)
