"""The contract of a platform that runs sites: start a job, look at it, read its log, end it, and find it again.

A job is one attempt to run one site of a run. Platforms know single jobs only; what makes them a fleet (records in the
bucket, restarts, budgets) is launch/fleet.py's. Every platform passes tests/contracts/test_executor_contract.py.
"""

import json
import re
import shlex
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from hashlib import sha256
from itertools import chain
from typing import TypeVar, cast

from composer_prime.errors import BadInput, ComposerPrimeError, ExecutorError
from composer_prime.executors.packages import Packages
from composer_prime.redaction import Redactor, hidden_values

Method = TypeVar("Method", bound=Callable[..., object])

LABEL_RUN, LABEL_SITE, LABEL_ATTEMPT = "composer-prime-run", "composer-prime-site", "composer-prime-attempt"
"""Labels by which a platform's own list tells whose job it is."""
CACHE_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "weights": {"HF_HOME": ""},
    "compiles": {
        "TORCHINDUCTOR_CACHE_DIR": "/torchinductor",
        "TRITON_CACHE_DIR": "/triton",
        "VLLM_CACHE_ROOT": "/vllm",
    },
}
"""Caches by name, and what points libraries at folders in them."""


class JobState(StrEnum):
    """Where a job stands. The platform's own word is in `JobStatus.message`."""

    PENDING = "pending"
    """Accepted, not started: waiting for a machine, pulling its image."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """Ended by itself with exit code 0."""
    FAILED = "failed"
    """Ended by itself with another exit code, or by a signal that nobody here sent."""
    PREEMPTED = "preempted"
    """The platform took the machine back."""
    TIMED_OUT = "timed-out"
    """Ran past its `timeout_s`, and was ended by the platform."""
    CANCELLED = "cancelled"
    """Ended because somebody asked for it."""

    @property
    def final(self) -> bool:
        """Whether nothing of the job runs, and nothing is billed, any more."""
        return self not in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class Resources:
    """The machine that a job asks for.

    gpu        a kind as the platform names it ("H100", "a100-large"), several with commas where any will do; None: no
               GPU
    gpu_count  of that kind
    cpus, memory_gib, disk_gib   None: the platform's default
    region, cloud   where it stands, as the platform names it; None: anywhere
    nonpreemptible  whether it must not be taken back
    """

    gpu: str | None = None
    gpu_count: int = 0
    cpus: float | None = None
    memory_gib: float | None = None
    disk_gib: float | None = None
    region: str | None = None
    cloud: str | None = None
    nonpreemptible: bool = False


def gpu_kinds(resources: Resources) -> list[str]:
    """The kinds of GPU that will do, the best first."""
    return [] if resources.gpu is None else [kind.strip() for kind in resources.gpu.split(",")]


@dataclass(frozen=True, repr=False)
class Secrets:
    """Environment variables whose values are secret. Text forms and iteration give names only."""

    _values: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(sorted(self._values))})"

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def reveal(self) -> dict[str, str]:
        """The values, to be handed to a platform's secret mechanism and to nothing else."""
        return dict(self._values)

    def also(self, values: Mapping[str, str]) -> "Secrets":
        """These, and `values`."""
        return Secrets({**self._values, **values})

    def redact(self, text: str) -> str:
        """`text` with every secret replaced, also where it stands as JSON or in a URL, or a long line of it alone."""
        return Redactor(hidden_values(self._values)).text(text)

    def redact_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """As `redact`, of lines as they come; a value that spans lines becomes one word, so lines may get fewer."""
        redactor, rest = Redactor(hidden_values(self._values)), b""
        for line in chain(lines, (None,)):
            shown = redactor.flush() if line is None else redactor.feed(f"{line}\n".encode("utf-8", "surrogateescape"))
            *whole, rest = (rest + shown).split(b"\n")
            yield from (each.decode("utf-8", "surrogateescape") for each in whole)
        if rest:
            yield rest.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class JobSpec:
    """One attempt to run one site.

    run, site, attempt   name the job: a platform never has two of the same three. attempt counts from 1
    command      argv, run without a shell; the command line is seen by everyone and holds no secret
    env          plain environment variables
    secrets      handed over by the platform's secret mechanism only, seen by the job as environment variables
    timeout_s    after which the platform ends the job; always set, since platforms' own defaults are minutes
    image        container image; None: the platform's default. Ignored where there are no containers
    registry_secret   the platform's name of the secret that its registry asks for; None: none
    packages     what is installed on the image first; None: nothing. Where the job itself does it, its secrets hold the
                 links to the wheels when it is submitted
    caches       name -> absolute path in the job: folders that outlive it where the platform can keep them; those named
                 in CACHE_VARIABLES are in use, others are the job's own affair
    """

    run: str
    site: str
    attempt: int
    command: tuple[str, ...]
    timeout_s: int
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    resources: Resources = Resources()
    image: str | None = None
    registry_secret: str | None = None
    packages: Packages | None = None
    caches: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The job's name on a platform; `parse_name` of it gives the three back."""
        return f"{self.run}--{self.site}--{self.attempt}"

    @property
    def cache_env(self) -> dict[str, str]:
        """The variables of its caches, less those that the job is given as `env` or as secrets: these win."""
        given = {*self.env, *self.secrets}
        return {
            variable: path.rstrip("/") + below
            for name, path in self.caches.items()
            for variable, below in CACHE_VARIABLES.get(name, {}).items()
            if variable not in given
        }

    @property
    def variables(self) -> dict[str, str]:
        """All its plain variables, those of its caches too; a secret of the same name wins."""
        given = {**self.cache_env, **self.env}
        return {name: value for name, value in given.items() if name not in self.secrets}

    @property
    def installing_command(self) -> list[str]:
        """Its command, after the installation of its packages where the job itself does that."""
        has_gpu = self.resources.gpu is not None
        return self.packages.before(self.command, has_gpu=has_gpu) if self.packages else list(self.command)

    @property
    def sha256(self) -> str:
        """Tells jobs apart that do other things, or on other machines; equal for equal ones of any time-out."""
        parts = (self.run, self.site, self.attempt, self.command, dict(self.env), list(self.secrets))
        where = (vars(self.resources), self.image, self.registry_secret, dict(self.caches))
        return sha256(json.dumps((parts, where), sort_keys=True).encode()).hexdigest()

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the job on a platform that has labels."""
        return {LABEL_RUN: self.run, LABEL_SITE: self.site, LABEL_ATTEMPT: str(self.attempt)}


@dataclass(frozen=True)
class Job:
    """A job that a platform has.

    id     the platform's name for it: enough, with the platform's own credentials, to reach it from any machine. It may
           come from a bucket that others write: an executor takes it only for a job of this run, site and attempt
    """

    platform: str
    id: str
    run: str
    site: str
    attempt: int


@dataclass(frozen=True)
class JobStatus:
    """A job as its platform sees it.

    exit_code    of the command, once it has ended by itself; -N for signal N; None where the platform doesn't tell
    message      the platform's own word, for people; secrets are redacted
    started_at, ended_at   Unix seconds on the platform's clock, which the bill goes by; None: not yet, or unknown
    half_submitted   who submitted it ended before the platform was told to run it: `submit` does that
    """

    state: JobState
    exit_code: int | None = None
    message: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    half_submitted: bool = False


@dataclass(frozen=True)
class Price:
    """The cost of a job's hour.

    usd_per_hour   None: unknown; 0 for one's own machines
    source         where the figure is from, with its date
    overrun_s      seconds beyond its time-out for which a job may be billed: the time to end, and rounding
    unbounded      what to set before `usd_per_hour` is the most that an hour can cost; "": it is
    """

    usd_per_hour: float | None
    source: str
    overrun_s: int = 0
    unbounded: str = ""


def hides_secrets(method: Method) -> Method:
    """For an executor's methods that take a spec: no error that they raise shows a value of the job's secrets.

    Platforms quote requests in their refusals. An error of ours keeps its type; another becomes an ExecutorError.
    """

    @wraps(method)
    def guarded(executor: object, spec: JobSpec) -> object:
        try:
            return method(executor, spec)
        except Exception as error:
            said = "".join(traceback.format_exception(error))  # of those that came before it, too
            if spec.secrets.redact(said) == said:
                raise
            shown = spec.secrets.redact(str(error))
            if isinstance(error, ComposerPrimeError):
                raise type(error)(shown) from None
            raise ExecutorError(f"job {spec.name} could not be started: {type(error).__name__}: {shown}") from None

    return cast(Method, guarded)


class Executor(ABC):
    """One platform. Synchronous; one instance may be used by several threads at once.

    Methods raise BadInput for what the person can fix (no token, an unknown GPU: nearest names are shown), JobUnknown
    for a job that the platform doesn't have or whose id is another's, and ExecutorError when the platform failed after
    retries. Requests that a busy platform refused (429, 5xx, a lost connection) are repeated with growing pauses first.
    """

    platform: str
    """A name of open.PLATFORMS."""

    @abstractmethod
    def check(self, spec: JobSpec) -> None:
        """Refuse, with BadInput, what could not run: before anything is started or billed, and without a login."""

    def log_in(self) -> None:
        """Raise BadInput where this machine has no login for the platform, or a wrong one."""
        self.credentials()

    @abstractmethod
    def credentials(self) -> dict[str, str]:
        """Environment variables by which a job elsewhere logs in as this machine does.

        Raises BadInput where there is no login, and where it can't be handed over.
        """

    def account(self) -> str:
        """Whose jobs it starts and sees, those of another account being hidden: this machine's, where there are none.

        Raises as requests do.
        """
        return socket.gethostname()

    @abstractmethod
    def machine(self, spec: JobSpec) -> str:
        """The machine that the job would run on, in the platform's own terms."""

    def describe(self, spec: JobSpec) -> str:
        """The job that `submit` would start, for a dry run. Secrets appear by name only."""
        login = f" (with the secret {spec.registry_secret})" if spec.registry_secret else ""
        rows = {
            "machine": self.machine(spec),
            "image": spec.image and spec.image + login,
            "installs": spec.packages and str(spec.packages),
            "command": shlex.join(spec.command),
            "env": shlex.join(f"{name}={value}" for name, value in sorted(spec.variables.items())),
            "secrets": ", ".join(spec.secrets),
            "caches": ", ".join(f"{name} in {path}" for name, path in sorted(spec.caches.items())),
            "time-out": f"{spec.timeout_s} s",
        }
        lines = [f"job {spec.name}", *(f"  {name:<9}{value}" for name, value in rows.items() if value)]
        return spec.secrets.redact("\n".join(lines))

    def script(self, spec: JobSpec) -> str:
        """What installs the job's packages: its shell's script, or a Dockerfile after its FROM; "": nothing does."""
        return spec.installing_command[2] if spec.packages else ""

    @abstractmethod
    def price(self, spec: JobSpec) -> Price:
        """The job's cost."""

    @abstractmethod
    def submit(self, spec: JobSpec) -> Job:
        """Start the job unless the platform has one of this run, site and attempt: then that one is returned.

        Returns once the platform has accepted it. A caller killed in between finds the job by `find` or by calling
        again; of two that raced, all callers keep the same one and the other is cancelled.
        """

    @abstractmethod
    def find(self, run: str) -> list[Job]:
        """All jobs of a run that the platform still knows, ended ones too, by site and attempt."""

    @abstractmethod
    def poll(self, job: Job) -> JobStatus:
        """How the job is now."""

    @abstractmethod
    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        """The job's output from its start, by lines without their ends, redacted by the caller; `follow` until its end.

        Also after the end, and after a disconnect, for as long as the platform keeps them.
        """

    @abstractmethod
    def cancel(self, job: Job) -> JobStatus:
        """End the job, pending or running, with all its processes, and return its final status.

        Returns only when the platform confirms that it has ended; a job that had ended stays as it is. Raises
        ExecutorError, saying that it may still be billed, when there is no confirmation.
        """

    def close(self) -> None:  # noqa: B027 (most hold no connection)
        """Let go of connections; jobs go on."""


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_names(spec: JobSpec) -> None:
    """Raise BadInput for names that no job can have, wherever it runs."""
    check_name("run", spec.run)
    check_name("site", spec.site)


def refuse_placement(spec: JobSpec, where: str) -> None:
    """Raise BadInput for a job that is to stand somewhere, on a platform that places none."""
    wanted = spec.resources
    for name in ("region", "cloud", "nonpreemptible"):
        if getattr(wanted, name):
            raise BadInput(f"launch.{name} ({getattr(wanted, name)}) can't be asked of {where}: drop it")


def check_name(what: str, name: str) -> str:
    """Return a run's or a site's name when a job's folder and labels can hold it, else raise BadInput."""
    if not _NAME.fullmatch(name):
        raise BadInput(f"{what} ({name!r}) must be 1 to 128 of letters, digits, '.', '_' and '-': choose another name")
    return name


def parse_name(name: str) -> tuple[str, str, int] | None:
    """(run, site, attempt) of a job's name; None for a name that `JobSpec.name` doesn't make."""
    parts = name.rsplit("--", 2)
    if len(parts) != 3 or not parts[2].isascii() or not parts[2].isdigit():
        return None
    return parts[0], parts[1], int(parts[2])
