"""The PAIRS file: JSON lines, each a pair of actions at a state or the score of a step.

Written whole or not at all, and with the same bytes for the same records. Text is escaped to ASCII, so that half a
surrogate in a trace is kept, too.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from composer_prime.errors import BadInput

Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TeacherVote(_Record):
    """What one teacher said at a pair's state.

    model     that answered
    weight    of its vote, circularity counted
    chose     which action is its own
    circular  whose model family it shares, and lost weight for
    """

    model: str
    weight: Annotated[float, Field(gt=0)]
    chose: Literal["chosen", "rejected", "other"]
    circular: Literal["student", "author"] | None = None


class Pair(_Record):
    """Two actions at a state: the teachers' consensus, chosen over what the author did.

    state             TraceState.id
    messages          what the author saw, with `tools` as in TraceState
    chosen, rejected  assistant messages without thinking
    weight            the consensus's share of the teachers' weight, above 0
    teachers          by name
    """

    kind: Literal["pair"] = "pair"
    state: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    chosen: dict[str, Any]
    rejected: dict[str, Any]
    weight: Annotated[float, Field(gt=0, le=1)]
    teachers: dict[str, TeacherVote]


class StepScore(_Record):
    """What the teachers say of what the author did at one turn of a session.

    score      the share of their weight that agrees with it
    supported  the same as far as enough votes say so, else 0.5 (`votes.supported`); None: too few teachers answered
    """

    kind: Literal["score"] = "score"
    session: str
    turn: Annotated[int, Field(ge=0)]
    state: str
    score: Share
    supported: Share | None


Record: TypeAlias = Pair | StepScore
_ANY: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def write_pairs(path: Path, records: Iterable[Record]) -> None:
    """Replace the file by one with these records, in their order. Raises BadInput where it can't be written."""
    beside = path.with_name(f"{path.name}.part")
    try:
        with beside.open("w", encoding="ascii") as file:
            for record in records:
                file.write(json.dumps(record.model_dump(), separators=(",", ":")) + "\n")
        os.replace(beside, path)
    except OSError as error:
        raise BadInput(f"{path} can't be written: {error}: name a file in a folder that is there") from error


def read_pairs(path: Path) -> Iterator[Record]:
    """The records of a file in their order.

    Raises BadInput naming the line that isn't a record, or where the file can't be read or has none.
    """
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _record(line, f"{path}, line {number}")
    except OSError as error:
        raise BadInput(f"{path} can't be read: {error}: make it with `composer-prime replay pairs`") from error
    if not number:
        raise BadInput(f"{path} is empty: make it with `composer-prime replay pairs`")


def _record(line: bytes, where: str) -> Record:
    try:
        return _ANY.validate_python(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{where}, is no pair and no score ({_reason(error)}): make the file again with "
            "`composer-prime replay pairs`"
        ) from error


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
    return str(error)
