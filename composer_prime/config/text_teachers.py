"""`TEACHERS.toml`: models behind any OpenAI-compatible API that say what they would have done, and what they cost.

Prices are part of it, because dollars are reserved before a request is sent: a price that is missing is asked for.
"""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from composer_prime.config.messages import describe
from composer_prime.config.table import Table
from composer_prime.config.teachers import check_name, check_url
from composer_prime.errors import ConfigError


class TextTeacher(Table):
    """`[[teachers]]`: one model that is asked."""

    name: Annotated[str, AfterValidator(check_name)]
    """The teacher's name in answers, votes and the ledger."""

    base_url: Annotated[str, AfterValidator(check_url)]
    """Root of a server with /v1/chat/completions; a trailing /v1 is dropped."""

    model: str = Field(min_length=1)
    """The model to ask for, as the server spells it."""

    usd_per_million_prompt_tokens: float = Field(ge=0)
    """Dollars for a million tokens read; 0 is a price."""

    usd_per_million_completion_tokens: float = Field(ge=0)
    """Dollars for a million tokens written, reasoning included; 0 is a price."""

    usd_per_million_cached_tokens: float | None = Field(default=None, ge=0)
    """Dollars for a million prompt tokens that the server had in its cache; None: as for all prompt tokens."""

    api_key_var: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the server's key; None: it wants none."""

    weight: float = Field(default=1.0, gt=0)
    """Its share in a vote, relative to the other teachers that answered."""

    tier: int = Field(default=0, ge=0)
    """Tier 0 is asked first; a higher one only where the tier below disagrees, or has no usable answer."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds one request may take; after them its answer counts as lost, and as paid."""

    max_in_flight: int = Field(default=8, ge=1)
    """Requests to it at once."""

    max_tokens: int = Field(default=4096, ge=1)
    """Tokens of an answer at most, reasoning included; a longer one is unusable."""

    temperature: float = Field(default=0.0, ge=0)
    """Of sampling."""

    @model_validator(mode="before")
    @classmethod
    def _ask_for_what_is_missing(cls, data: object) -> object:
        for key, field in cls.model_fields.items():
            if isinstance(data, dict) and field.is_required() and key not in data:
                remedy = "add it"
                if key.startswith("usd_"):
                    remedy = "prices aren't guessed, so look it up with the provider; 0 is for a model of your own"
                raise ValueError(f"teacher {data.get('name', '(without a name)')} has no {key}: {remedy}")
        return data


class TextTeachers(Table):
    """The whole file."""

    teachers: tuple[TextTeacher, ...] = Field(min_length=1)
    """Who is asked."""

    @model_validator(mode="after")
    def _check_teachers(self) -> Self:
        asked: dict[tuple[str, str, int, float], str] = {}
        names: set[str] = set()
        for teacher in self.teachers:
            if teacher.name in names:
                raise ValueError(f"teacher name ({teacher.name}) is given twice: rename one")
            names.add(teacher.name)
            what = (teacher.base_url, teacher.model, teacher.max_tokens, teacher.temperature)
            if what in asked:
                raise ValueError(
                    f"teachers {asked[what]} and {teacher.name} are the same model at the same server, sampled the "
                    "same: it would have two votes, so leave one out"
                )
            asked[what] = teacher.name
        return self


def load_text_teachers(path: Path) -> tuple[TextTeacher, ...]:
    """The teachers of a file, one at least. Raises ConfigError, one line."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"teachers' file ({path}) doesn't exist: write [[teachers]] tables into it") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"teachers' file ({path}) isn't TOML: {error}: correct it") from None
    if not data.get("teachers"):
        raise ConfigError(f"teachers' file ({path}) names no teacher: add a [[teachers]] table")
    try:
        return TextTeachers.model_validate_json(json.dumps(data, default=str), strict=True).teachers
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(TextTeachers, error)}") from None
