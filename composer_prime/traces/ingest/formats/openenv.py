"""OpenEnv's TrainingTrace: turns that hold a request and its response as they were sent. Records are the turns.

Token ids and their logprobs are not read here."""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.dialects.exchanges import Exchange, exchange_of, read_calls
from composer_prime.traces.ingest.reading import Reading
from composer_prime.traces.ingest.records import Part, mapping, objects, sequence

NAME = "openenv"
NO_DIALECT = "turn in a dialect that isn't read"


def lacks(value: Any) -> list[str]:
    """What a JSON value lacks to be a TrainingTrace."""
    given = mapping(value)
    checks = {
        "schema_version 1": given.get("schema_version") == 1,
        "turns with request and response": any("request" in turn for turn in objects(sequence(given.get("turns")))),
    }
    return [name for name, holds in checks.items() if not holds]


def read(parts: Sequence[Part]) -> Reading:
    """One session for each list of tools that the file's requests have."""
    return read_calls(NAME, parts, lacks, lambda value: sequence(value.get("turns")), _exchange)


def _exchange(turn: Mapping[str, Any]) -> Exchange | str:
    return exchange_of(turn.get("request"), turn.get("response")) or NO_DIALECT
