"""`TEACHERS.toml`: models behind any OpenAI-compatible API that say what they would have done, and what they cost.

Prices are part of it, because dollars are reserved before a request is sent: a price that is missing is asked for.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from composer_prime.config.load import read_file
from composer_prime.config.messages import describe
from composer_prime.config.table import Table
from composer_prime.config.teachers import check_name, check_url
from composer_prime.errors import ConfigError

_OURS = {"model", "messages", "tools", "n", "stream", "max_tokens", "max_completion_tokens", "temperature"}
"""Of a request's body, what `extra_body` may not say: it is ours, or would cost more than is reserved."""


class TextTeacher(Table):
    """`[[teachers]]`: one model that is asked."""

    name: Annotated[str, AfterValidator(check_name)]
    """The teacher's name in answers, votes and the ledger."""

    base_url: Annotated[str, AfterValidator(check_url)]
    """Root of a server with OpenAI's chat completions; a trailing /v1 is dropped."""

    path: str = Field(default="/v1/chat/completions", pattern="^/")
    """Where the server takes them, below base_url."""

    model: str = Field(min_length=1)
    """The model to ask for, as the server spells it."""

    usd_per_million_prompt_tokens: float = Field(ge=0)
    """Dollars for a million tokens read; 0 is a price."""

    usd_per_million_completion_tokens: float = Field(ge=0)
    """Dollars for a million tokens written, reasoning included; 0 is a price."""

    usd_per_million_cached_tokens: float | None = Field(default=None, ge=0)
    """Dollars for a million prompt tokens that the server had in its cache; None: as for all prompt tokens."""

    usd_per_million_cache_write_tokens: float | None = Field(default=None, ge=0)
    """Dollars for a million prompt tokens that it put into its cache; None: as for all prompt tokens."""

    api_key_var: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the server's key; None: it wants none."""

    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with each request. "$NAME" is the value of that environment variable; what is sent is written nowhere."""

    weight: float = Field(default=1.0, gt=0)
    """Its share in a vote, relative to the other teachers that answered."""

    tier: int = Field(default=0, ge=0)
    """Tier 0 is asked first; a higher one only where no two usable answers below it agree."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds one request may take; after them its answer counts as lost, and as paid."""

    max_in_flight: int = Field(default=8, ge=1)
    """Requests to it at once; with `batch`, requests a batch."""

    max_tokens: int = Field(default=4096, ge=1)
    """Tokens of an answer at most, reasoning included; a longer one is unusable."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The same in place of max_tokens, and sent under this name: reasoning models of OpenAI want it."""

    temperature: Annotated[float, Field(ge=0)] | Literal["unsent"] = 0.0
    """Of sampling; "unsent" leaves it to the server, as reasoning models want it."""

    reasoning_effort: str | None = Field(default=None, min_length=1)
    """Sent as it is, such as "low"; None: not sent."""

    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More of the request's body, as the server spells it."""

    prompt_cache: Literal["anthropic"] | None = None
    """"anthropic": the last message carries `cache_control`, which Anthropic's models want to cache a prompt."""

    batch: bool = False
    """Whether questions go through OpenAI's batch API (/v1/files, /v1/batches): cheaper, and up to a day later."""

    batch_discount: float = Field(default=0.5, ge=0, lt=1)
    """Share of every price that a batch saves."""

    usage_url: str | None = Field(default=None, pattern="^https?://")
    """Tells what a lost call cost: GET `usage_url?key=` with its X-Request-Id gives {"cost": dollars or null}."""

    release_lost_after_s: float = Field(default=86400.0, gt=0)
    """Seconds after which the reservation of a lost call is given back, if nothing told what it cost."""

    @property
    def longest_answer(self) -> int:
        """Tokens of an answer at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self) -> dict[str, Any]:
        """What a request says beside messages and tools."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        told = {"model": self.model, limit: self.longest_answer}
        if self.temperature != "unsent":
            told["temperature"] = self.temperature
        if self.reasoning_effort is not None:
            told["reasoning_effort"] = self.reasoning_effort
        return told | self.extra_body

    def identity(self) -> list[Any]:
        """What changes an answer: teachers that share it would answer alike."""
        return [self.base_url, self.path, self.headers, self.sampling()]

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if ours := sorted(_OURS & self.extra_body.keys()):
            raise ValueError(f"teacher {self.name}: extra_body can't hold {ours[0]}, which is set otherwise: drop it")
        if self.prompt_cache is not None and self.usd_per_million_cache_write_tokens is None:
            raise ValueError(
                f"teacher {self.name} has prompt_cache and no usd_per_million_cache_write_tokens: prices aren't "
                "guessed, so look it up with the provider"
            )
        return self


class TextTeachers(Table):
    """The whole file."""

    teachers: tuple[TextTeacher, ...] = Field(min_length=1)
    """Who is asked."""

    @model_validator(mode="after")
    def _check_teachers(self) -> Self:
        asked: dict[str, str] = {}
        names: set[str] = set()
        for teacher in self.teachers:
            if teacher.name in names:
                raise ValueError(f"teacher name ({teacher.name}) is given twice: rename one")
            names.add(teacher.name)
            what = json.dumps(teacher.identity(), sort_keys=True)
            if what in asked:
                raise ValueError(
                    f"teachers {asked[what]} and {teacher.name} are the same model at the same server, sampled the "
                    "same: it would have two votes, so leave one out"
                )
            asked[what] = teacher.name
        return self


def load_text_teachers(path: Path) -> tuple[TextTeacher, ...]:
    """The teachers of a file, one at least. Raises ConfigError, one line."""
    data = read_file(path, "teachers' file")
    try:
        return TextTeachers.model_validate_json(json.dumps(data, default=str), strict=True).teachers
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(TextTeachers, error)}") from None
