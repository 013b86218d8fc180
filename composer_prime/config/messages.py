"""Says in one line what is wrong with a recipe: the setting's full name, its value, the limit, the remedy.

pydantic finds the mistakes and names the limits; here a remedy is added, and an unknown key gets the nearest known one.
"""

import difflib
import json
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_REMEDIES = {
    "greater_than": "raise it",
    "greater_than_equal": "raise it",
    "less_than": "lower it",
    "less_than_equal": "lower it",
    "literal_error": "choose one of them",
    "bool_type": "write true or false",
    "string_type": "put it in quotes",
    "model_type": "write its keys below [its name]",
}
"""By pydantic's name of a mistake; any other is to be corrected."""

GONE = {
    "outer.committer": "every site may close rounds, and a store that lets two writers win is refused: remove it",
    "outer.merge_alpha": "a site always adopts the new masters and carries its own movement: remove it",
    "outer.pace": "a fragment is due every outer.inner_steps / outer.fragments steps: remove it",
    "outer.inner_seconds": "a fragment is due every outer.inner_steps / outer.fragments steps: set those",
    "outer.merged_codec": "merged parts travel as int8: remove it",
    "outer.error_feedback": "coding errors are always fed back: remove it",
    "outer.gather_sites": "a round of more than 4 offers is always merged in parts: remove it",
    "outer.slices": "a payload always has at most 128 pieces: remove it",
    "outer.clip": 'with outer.aggregate = "clipped" offers are cut to twice the median norm: set that, or remove it',
    "outer.guest_share": "guests have together at most a third of a round's weight: remove it",
    "outer.guest_clip": "a guest's offer is cut to the members' median norm: remove it",
    "outer.step_tokens": "it follows from batch and row length in a run with an owner: remove it",
    "outer.keys": "the site that creates the run is admitted by its site.key_file, others by `composer-prime admit`",
    "outer.trim": 'aggregate "clipped" bounds what one site moves: remove it',
    "site.exact_join_s": "a site trains while the run's weights come, and offers once they are there: remove it",
}
"""Keys that recipes had before, and what does their job now."""


def describe(model: type[BaseModel], error: ValidationError) -> str:
    """One line for the first mistake, unknown keys before all others, and how many more there are."""
    mistakes = sorted(error.errors(), key=lambda mistake: mistake["type"] != "extra_forbidden")
    line = _sentence(model, mistakes[0])
    more = len(mistakes) - 1
    return f"{line} (and {more} more)" if more else line


def dotted(loc: tuple[int | str, ...]) -> str:
    """A place in a recipe as one name: ("source", 0, "env") is source[0].env."""
    name = ""
    for part in loc:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def known_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted name a model knows, tables included; lists of tables are walked without a number."""
    for key, field in model.model_fields.items():
        name = f"{prefix}{key}"
        yield name
        table = table_in(field.annotation)
        if table is not None:
            yield from known_names(table, f"{name}.")


def _sentence(model: type[BaseModel], mistake: ErrorDetails) -> str:
    kind, loc, value = mistake["type"], mistake["loc"], mistake["input"]
    name = dotted(loc)
    if kind == "extra_forbidden" and name in GONE:
        return f"{name} is no key any more: {GONE[name]}"
    if kind == "extra_forbidden":
        return f"{name} isn't a known key: {_nearest(model, loc)}"
    if kind == "missing":
        return f"{name} is missing: add it"
    if kind == "value_error":
        return str(mistake.get("ctx", {})["error"])
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    wanted = (
        re.sub(r"^\w+ should", "must", mistake["msg"]).replace("an object", "a table").replace("valid array", "list")
    )
    return f"{name} ({shown[:60]}) {wanted}: {_REMEDIES.get(kind, 'correct it')}"


def _nearest(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """The remedy for an unknown key: the closest sibling, else the closest name anywhere, else what there is."""
    wrong, parents = str(loc[-1]), loc[:-1]
    siblings = list(_table_at(model, parents).model_fields)
    close = difflib.get_close_matches(wrong, siblings, n=1)
    if close:
        return f"did you mean {dotted((*parents, close[0]))}?"
    everywhere = list(known_names(model))
    by_last = {name.rpartition(".")[2]: name for name in reversed(everywhere)}
    close = difflib.get_close_matches(wrong, list(by_last), n=1, cutoff=0.7)
    if close:
        return f"did you mean {by_last[close[0]]}?"
    place = dotted(parents) or "the recipe"
    return f"remove it, or use one that {place} knows: {', '.join(siblings)}"


def _table_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The table at a place that pydantic named, which exists; list positions and names in a dict are skipped."""
    table = model
    for part in loc:
        if isinstance(part, str) and part in table.model_fields:
            table = table_in(table.model_fields[part].annotation) or table
    return table


def table_in(annotation: Any) -> type[BaseModel] | None:
    """The table an annotation holds: itself, optional, in a tuple, or as a dict's values; None for a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, dict):
        return next(filter(None, map(table_in, get_args(annotation))), None)
    return None


def kinds_in(annotation: Any) -> Iterator[Any]:
    """The types of values that an annotation holds beside tables, and the values of a literal."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is Annotated:
        yield from kinds_in(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from kinds_in(each)
    elif annotation is not type(None) and table_in(annotation) is None:
        yield annotation
