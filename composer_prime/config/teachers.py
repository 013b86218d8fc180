"""The recipe's tables for teacher streams: `[[replay.teachers]]` and `[hints]`. No torch.

The stamping environment (sites/prime_rl/stamping_env.py) takes the same tables, so that a PRIME-RL site spells them
as ours does.
"""

import re
import string
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from composer_prime.config.stored import PairsConfig, StoredTracesConfig
from composer_prime.config.table import Table, shared

HintKind = Literal["unknown_tool", "bad_arguments", "timeout", "tests", "traceback", "exit_code", "error"]
"""What a failed call was known by: a tool that isn't there, arguments it doesn't take, no answer in time, tests that
failed, a Python traceback, an exit code other than 0, or an error in so many words. A tool that answers with a JSON
object may say it itself, as `error_kind`."""

OutcomeKind = Literal["reply", "out_of_turns"]
"""How a rollout ended that earned less than others: with a reply, or with a call after which there were no turns."""

NO_FROZEN_SERVER = (
    'env.hints.base_url must be given with teacher = "frozen", since PRIME-RL\'s server holds only the policy of the '
    "moment: serve the model that the run begins with on a server of its own, and write its address there"
)
NO_AVERAGE_SERVER = (
    'env.hints.teacher ("ema") is held by an embedded site\'s own server, not by PRIME-RL\'s: set it to "frozen", '
    "and env.hints.base_url to a server of the model that the run begins with"
)
REF_KL_IS_SAMPLED = (
    "env.stamp_ref_kl is for teachers that give one number a token: drop it, or drop [trainer.distill] and env.top_k"
)
"""Why PRIME-RL's environment is refused, by who renders it and by itself."""

HINT_FIELDS = ("error", "tool")
"""What a hint's template may name in braces: the tool message's telling line, and the tool's name."""


def check_url(url: str) -> str:
    """A server's root without a slash or /v1 at its end. Raises ValueError when it isn't one."""
    if not re.fullmatch(r"https?://[^\s/]+(/.*)?", url):
        raise ValueError(f"base_url ({url}) must be http://host:port or https://host: write the server's address")
    return url.rstrip("/").removesuffix("/v1")


def check_name(name: str) -> str:
    """A teacher's name as it is. Raises ValueError when it isn't one."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", name):
        raise ValueError(
            f"teacher name ({name!r}) must be 1 to 32 of a-z, 0-9, '_' and '-', starting with a letter or digit: "
            "choose another name"
        )
    return name


def _check_template(template: str) -> str:
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ValueError(f"template ({template!r}) can't be read: {error}: double a brace that is meant") from None
    unknown = sorted(fields - set(HINT_FIELDS))
    if unknown:
        raise ValueError(
            f"template ({template!r}) names {{{unknown[0]}}}, but there are {{error}} and {{tool}}: use those"
        )
    return template


class TeacherConfig(Table):
    """`[[replay.teachers]]`: one served model that scores what the policy sampled."""

    name: Annotated[str, AfterValidator(check_name)] = shared()
    """The teacher's name in metrics and messages."""

    base_url: Annotated[str, AfterValidator(check_url)] = shared()
    """Root of a server that returns prompt logprobs: a vLLM server, or ours; a trailing /v1 is dropped."""

    model: str | None = shared(default=None, min_length=1)
    """The name it is served under; None: the first that the server lists."""

    weight: float = shared(default=1.0, gt=0)
    """w_k: its share of the mixture, relative to the other teachers that answered for a token."""

    timeout_s: float = shared(default=30.0, gt=0, le=3600)
    """Seconds a rollout waits for it, retries included; after them it drops out of that rollout's mixture."""

    api_key_var: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the server's key; None: it wants none."""


class ReplayConfig(Table):
    """`[replay]`"""

    teachers: tuple[TeacherConfig, ...] = shared(())
    """Who scores the sampled tokens; their mixture is what the loss's replay term pulls towards."""

    pairs: PairsConfig | None = None
    """Preference pairs from stored sessions; None: none."""

    traces: StoredTracesConfig | None = None
    """Stored sessions' own turns; None: none."""

    def anchored(self) -> Self:
        """The same with its paths absolute."""
        files = {"pairs": self.pairs and self.pairs.anchored(), "traces": self.traces and self.traces.anchored()}
        return self.model_copy(update=files)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_distinct(self.teachers)
        return self


class HintWriterConfig(Table):
    """`[hints.writer]`: a model that writes the hint for a failed call where recipe and environment say none."""

    base_url: Annotated[str, AfterValidator(check_url)]
    """Root of any server with OpenAI's /v1/chat/completions; a trailing /v1 is dropped."""

    model: str = Field(min_length=1)
    """The name it is served under."""

    timeout_s: float = Field(default=20.0, gt=0)
    """Seconds a hint may take, retries included; after them our own template stands in."""

    api_key_var: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the server's key; None: it wants none."""


HintTeacher = Literal["frozen", "ema", "live"]
"""Who reads the hint: the run's first policy, which holds still, an average of the policies there were, or the policy
of the moment."""


class HintsConfig(Table):
    """`[hints]`: a policy under a context that holds a hint, as a teacher of the turn that the hint is for."""

    teacher: HintTeacher = shared("frozen")
    """Whose distributions are taught."""

    ema_decay: float = shared(default=0.99, gt=0, lt=1)
    """d of `teacher = "ema"`: after each training step the average is d times itself and 1 - d times the policy."""

    allow_live: bool = shared(False)
    """Whether `teacher = "live"` is meant: it destroyed every policy that we trained with it."""

    base_url: Annotated[str, AfterValidator(check_url)] | None = shared(None)
    """Root of a server of the frozen teacher; None: an embedded site's own server holds it besides the policy."""

    model: str | None = shared(default=None, min_length=1)
    """The name it is served under there; None: the first that the server lists."""

    timeout_s: float = shared(default=30.0, gt=0, le=3600)
    """Seconds a rollout waits for its hinted scores."""

    api_key_var: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the key of the server at base_url; None: it wants none."""

    templates: dict[HintKind | OutcomeKind, Annotated[str, AfterValidator(_check_template)]] = Field(
        default_factory=dict
    )
    """The hint's text by the kind of error or outcome, {error} and {tool} filled in; a kind left out has the
    environment's own `hint`, the writer's, or ours. Outcomes have none of ours."""

    writer: HintWriterConfig | None = None
    """Who writes hints; None: nobody."""

    shuffle: bool = shared(False)
    """Each mistake gets the last hint that was another: a control for ablations, never a help."""

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if self.teacher == "live" and not self.allow_live:
            raise ValueError(
                'hints.teacher ("live") is the policy that it teaches, and both fell from 0.96 to 0 with each other '
                'while every metric looked healthy: use "frozen", or say that you know with hints.allow_live = true'
            )
        if self.teacher != "frozen" and self.base_url is not None:
            raise ValueError(
                f'hints.base_url ({self.base_url}) is for teacher = "frozen": leave it out with "{self.teacher}"'
            )
        if self.teacher != "ema" and self.ema_decay != type(self).model_fields["ema_decay"].default:
            raise ValueError(
                f'hints.ema_decay ({self.ema_decay}) is for teacher = "ema", and it is "{self.teacher}": leave it out'
            )
        for name, value in (("model", self.model), ("api_key_var", self.api_key_var)):
            if self.base_url is None and value is not None:
                raise ValueError(
                    f"hints.{name} ({value}) is for the server at hints.base_url, and there is none: give base_url, or "
                    f"leave {name} out"
                )
        return self

    @property
    def is_held(self) -> bool:
        """Whether the teacher is a second model, which an embedded site's own server holds beside the policy."""
        return self.teacher != "live" and self.base_url is None

    @property
    def server(self) -> TeacherConfig | None:
        """The server at base_url, to be checked and asked as every teacher is; None: there is none."""
        if self.base_url is None:
            return None
        return TeacherConfig(
            name="hints",
            base_url=self.base_url,
            model=self.model,
            timeout_s=self.timeout_s,
            api_key_var=self.api_key_var,
        )


def check_distinct(teachers: tuple[TeacherConfig, ...]) -> None:
    """Raise ValueError when two teachers bear one name."""
    names = [teacher.name for teacher in teachers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"replay.teachers names must differ, but {twice[0]} is given twice: rename one")
