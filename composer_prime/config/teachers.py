"""The recipe's tables for what teachers say and what is stored: `[replay]` and `[hints]`. No torch.

The stamping environment (sites/prime_rl/stamping_env.py) takes the same tables, so that a PRIME-RL site spells them
as ours does.
"""

import re
import string
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from composer_prime.config.distill import Weight, is_off
from composer_prime.config.table import Table, shared

HintKind = Literal["unknown_tool", "bad_arguments", "timeout", "tests", "traceback", "exit_code", "error"]
"""What a failed call was known by: a tool that isn't there, arguments it doesn't take, no answer in time, tests that
failed, a Python traceback, an exit code other than 0, or an error in so many words. A tool that answers with a JSON
object may say it itself, as `error_kind`."""

OutcomeKind = Literal["reply", "out_of_turns"]
"""How a rollout ended that earned less than others: with a reply, or with a call after which there were no turns."""

_BETAS = {"dpo": 0.1, "simpo": 2.0}

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


class PreferenceConfig(Table):
    """What is learned of an action that teachers agree on, and of the author's in its place."""

    sft_tau: Weight = 1.0
    """Weight of the agreed action's cross entropy."""

    loss: Literal["dpo", "simpo"] = "dpo"
    """DPO (arXiv:2305.18290) against the run's first policy, or SimPO (arXiv:2405.14734), which needs no reference."""

    beta: float | None = Field(default=None, gt=0)
    """beta of the loss; None: 0.1 for DPO, 2 for SimPO."""

    gamma: float = Field(default=0.0, ge=0)
    """SimPO's target margin."""

    tau: Weight = 1.0
    """Weight of the preference term, where the author did something else."""

    min_logprob: float = Field(default=-1.0, le=0)
    """Nats a token of the agreed action, below which the preference term rests: the policy can't form it yet."""

    max_lead: float = Field(default=3.0, gt=0)
    """Nats by which the policy prefers what is chosen, as it is and against the run's first policy, from which on a
    pair rests."""

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.loss != "simpo" and self.gamma:
            raise ValueError(f'pairs.gamma ({self.gamma}) is for loss = "simpo", and it is "{self.loss}"')
        if is_off(self.tau) and is_off(self.sft_tau):
            raise ValueError("pairs.tau and sft_tau (0) must not both be 0, or nothing is learned: raise one")
        return self

    @property
    def scale(self) -> float:
        """beta, the loss's own where none is given."""
        return _BETAS[self.loss] if self.beta is None else self.beta

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with the run's first one."""
        return self.loss == "dpo" and not is_off(self.tau)


class PairsConfig(PreferenceConfig):
    """`[replay.pairs]`: what teachers agree on at the decision points of stored sessions."""

    store: Path
    """What `composer-prime replay ingest` filled."""

    file: Path
    """What `composer-prime replay pairs` wrote of it."""

    batch_size: int = Field(default=16, ge=1)
    """Decision points a training step."""

    held_out: float = Field(default=0.1, ge=0, lt=1)
    """Share of the points that a run without an environment doesn't learn from: it measures there how often the policy
    does what the teachers agree on."""

    too_long: Literal["cut", "leave_out"] = "cut"
    """Of a point longer than seq_len the oldest tool results are cut until it fits, or it is left out."""

    def anchored(self) -> Self:
        """The same with its paths absolute."""
        return self.model_copy(update={"store": self.store.absolute(), "file": self.file.absolute()})


class StoredTracesConfig(Table):
    """`[replay.traces]`: what the authors of stored sessions did, learned beside each step's rollouts."""

    store: Path
    """What `composer-prime replay ingest` filled."""

    scores: Path | None = None
    """What `composer-prime replay pairs` wrote: twice the share of teachers that agree with a turn, minus 1, is its
    advantage; None: every turn has advantage 1, which is cross entropy."""

    tau: Weight = 1.0
    """Weight of the term."""

    batch_size: int = Field(default=16, ge=1)
    """Turns a training step."""

    @model_validator(mode="after")
    def _check_weight(self) -> Self:
        if is_off(self.tau):
            raise ValueError("replay.traces.tau (0) must not be 0 at every step, or nothing is learned: raise it")
        return self

    def anchored(self) -> Self:
        """The same with its paths absolute."""
        return self.model_copy(
            update={"store": self.store.absolute(), "scores": self.scores and self.scores.absolute()}
        )


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

    def check_stamped(self, top_k: int) -> None:
        """Raise ValueError for what PRIME-RL's sources can't stamp, with `top_k` candidates a token."""
        if not top_k:
            raise ValueError(
                "env.hints needs [trainer.distill] with top_k of at least 1, since one number a token doesn't teach a "
                "hint: add the table, or drop env.hints"
            )
        if self.is_held:
            raise ValueError(
                f'env.hints.base_url must be given, and env.hints.teacher ("{self.teacher}") be "frozen", since '
                "PRIME-RL's server holds only the policy of the moment: serve the model that the run begins with on a "
                "server of its own, and write its address there"
            )

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
