"""The base of every table of a recipe, and the two kinds of names a recipe may give.

A table refuses keys it doesn't know and can't be changed once it is read: what a run uses is what was written down.
"""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

SITE_NAME = r"[a-z0-9][a-z0-9-]{0,31}"
RUN_NAME = r"[a-z0-9][a-z0-9._-]{0,63}"


class Table(BaseModel):
    """One table of a recipe: immutable, closed, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class OpenTable(BaseModel):
    """A table whose unknown keys are kept: they belong to the component the table configures, which checks them."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


SHARED = {"shared": True}


def shared(default: Any = ..., **bounds: Any) -> Any:
    """A recipe's field that an invitation may set, since all sites share it; else as `Field`."""
    return Field(default, json_schema_extra={**SHARED}, **bounds)


def _check_site_name(name: str) -> str:
    if not re.fullmatch(SITE_NAME, name):
        raise ValueError(
            f"site name ({name!r}) must be 1 to 32 of a-z, 0-9 and -, not starting with -: choose another name"
        )
    return name


def _check_run_name(name: str) -> str:
    if not re.fullmatch(RUN_NAME, name):
        raise ValueError(
            f"run.name ({name!r}) must be 1 to 64 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit: "
            "choose another name"
        )
    return name


SiteName = Annotated[str, AfterValidator(_check_site_name)]
"""A site's name: it becomes part of keys in the bucket and of folder names."""

RunName = Annotated[str, AfterValidator(_check_run_name)]
"""A run's name: it becomes a folder under output_dir and a prefix in the bucket."""
