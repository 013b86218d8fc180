"""The PAIRS file: JSON lines, what the teachers decided at each point of a store where they answered.

What was seen at a point stands in the store alone. Written whole or not at all, and with the same bytes for the same
decisions. Text is escaped to ASCII, so that half a surrogate in a trace is kept, too.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_prime.errors import BadInput

Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TeacherVote(_Record):
    """What one teacher said at a point.

    model     that answered
    weight    of its vote, circularity counted
    chose     which action is its own; "agreed" where the author's is the agreed one
    circular  whose model family it shares, and lost weight for
    """

    model: str
    weight: Annotated[float, Field(gt=0)]
    chose: Literal["agreed", "author", "other"]
    circular: Literal["student", "author"] | None = None


class Decision(_Record):
    """What the teachers say at one decision point.

    session, turn  of the point, and `state`, its TraceState.id
    score          the share of their weight that is for what the author did
    supported      the same as far as enough votes say so, else 0.5; None: too few answered
    support        the share that is for the agreed action, above 0; None: nothing is agreed on
    chosen         the agreed action, an assistant message without thinking; None: it is the author's own
    teachers       by name
    """

    session: str
    turn: Annotated[int, Field(ge=0)]
    state: str
    score: Share
    supported: Share | None
    support: Annotated[float, Field(gt=0, le=1)] | None
    chosen: dict[str, Any] | None
    teachers: dict[str, TeacherVote]


def write_decisions(path: Path, decisions: Iterable[Decision]) -> None:
    """Replace the file by one with these decisions, in their order. Raises BadInput where it can't be written."""
    beside = path.with_name(f"{path.name}.part")
    try:
        with beside.open("w", encoding="ascii") as file:
            file.writelines(json.dumps(one.model_dump(), separators=(",", ":")) + "\n" for one in decisions)
        os.replace(beside, path)
    except OSError as error:
        raise BadInput(f"{path} can't be written: {error}: name a file in a folder that is there") from error
    finally:
        beside.unlink(missing_ok=True)


def read_decisions(path: Path) -> Iterator[Decision]:
    """The decisions of a file in their order.

    Raises BadInput naming the line that isn't one, or where the file can't be read or has none.
    """
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _decision(line, f"{path}, line {number}")
    except OSError as error:
        raise BadInput(f"{path} can't be read: {error}: make it with `composer-prime replay pairs`") from error
    if not number:
        raise BadInput(f"{path} is empty: make it with `composer-prime replay pairs`")


def _decision(line: bytes, where: str) -> Decision:
    try:
        return Decision.model_validate(json.loads(line))
    except (ValueError, RecursionError) as error:
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            why = f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
        raise BadInput(
            f"{where}, is no decision ({why}): make the file again with `composer-prime replay pairs`"
        ) from error
