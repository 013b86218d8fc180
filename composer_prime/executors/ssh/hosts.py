"""`--on ssh:hosts.toml`: one's own machines, how the ssh client reaches each, and how many sites it takes at once.

Read and checked before any connection is made. Which host a new job goes to is decided here too, from what they report.
"""

import difflib
import hashlib
import re
import shlex
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from composer_prime.config.messages import describe
from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, Resources

_WORD = r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}"
_MACHINE = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]{1,45}(?:%[A-Za-z0-9._-]{1,32})?"
# ssh's own configuration may put these words into commands (ProxyCommand, Match exec): no shell sees more in them.
_ADDRESS = re.compile(rf"{_MACHINE}|{_IPV6}")
_USER = re.compile(rf"{_WORD}(?:[@\\][A-Za-z0-9][A-Za-z0-9._-]{{0,63}})?")
_HOP = re.compile(rf"(?:(?P<user>{_WORD})@)?(?P<address>\[{_IPV6}\]|{_MACHINE})(?::(?P<port>\d{{1,5}}))?")
_PYTHON = re.compile(r"(?:.*/)?(?:python|pypy)[0-9.]*[a-z]?")
_MAX_HOPS = 8
_MAX_TEXT = 1024
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Hop:
    """A machine on the way to a host. `user` and `port` None: as the ssh client's own configuration says."""

    address: str
    user: str | None = None
    port: int | None = None


class Host(BaseModel):
    """One machine. `~` in `key`, `known_hosts` and `ssh_config` is the home here, else the one there."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    address: str = Field(min_length=1)
    """Name or address, or a `Host` of `ssh_config`."""
    user: str | None = None
    """None: as `ssh_config` says, else your name here."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """None: as `ssh_config` says, else 22."""
    key: str | None = None
    """Private key file. None: the agent's keys and the usual files in ~/.ssh, as ssh itself takes them."""
    known_hosts: str = "~/.ssh/known_hosts"
    """The file that the host's key must stand in; a host that isn't there is refused."""
    ssh_config: str = "~/.ssh/config"
    """ssh's own configuration, read where it is there; "" for none."""
    proxy_jump: str | None = None
    """The way to a host that can't be reached directly: [user@]address[:port], several with commas, nearest first."""
    slots: int = Field(default=1, ge=1, le=64)
    """Sites that run at once; further ones wait. GPUs are shared out evenly among slots."""
    gpus: int = Field(default=0, ge=0, le=64)
    """GPUs of the machine that sites may use, numbered from 0."""
    gpu: str | None = None
    """Their kind, such as "H100": needed only where a recipe asks for one."""
    python: str = Field(default="python3", min_length=1)
    """Python 3.9 or newer there; a path names an environment, whose `composer-prime` is the one that runs."""
    workdir: str = Field(default="~/.composer-prime", min_length=1)
    """Folder there for jobs and their logs."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Variables for every job there, such as HF_HOME. No secrets: they go by the secret mechanism."""

    @field_validator("key")
    @classmethod
    def _key_is_a_path(cls, value: str | None) -> str | None:
        if value is not None and (_is_long(value) or "-----BEGIN" in value):
            raise ValueError("key must be the path of a private key's file, and is no path (not shown here): name one")
        return value

    @field_validator("address", "user", "known_hosts", "ssh_config", "gpu", "python", "workdir")
    @classmethod
    def _is_one_short_line(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and _is_long(value):
            raise ValueError(f"{info.field_name} ({value[:60]!r}) must be one line of at most {_MAX_TEXT} characters")
        return value

    @field_validator("address")
    @classmethod
    def _address_is_one(cls, value: str) -> str:
        if not _ADDRESS.fullmatch(value):
            raise ValueError(
                f"address ({value}) must be a name of letters, digits, '.', '_' and '-', or an IP address: another "
                "name goes into ssh_config, as HostName of one"
            )
        return value

    @field_validator("user")
    @classmethod
    def _user_is_one(cls, value: str | None) -> str | None:
        if value is not None and not _USER.fullmatch(value):
            raise ValueError(
                f"user ({value}) must be of letters, digits, '.', '_', '+' and '-', with @REALM behind it if need be: "
                "correct it"
            )
        return value

    @field_validator("python")
    @classmethod
    def _python_is_one(cls, value: str) -> str:
        if not _PYTHON.fullmatch(value):
            raise ValueError(f"python ({value}) must be python, pypy or a path that ends so: name one, as python3.12")
        return value

    @field_validator("workdir")
    @classmethod
    def _workdir_goes_down(cls, value: str) -> str:
        if ".." in value.split("/"):
            raise ValueError(f"workdir ({value}) must not hold '..': write the folder's path out")
        return value

    @field_validator("proxy_jump")
    @classmethod
    def _jump_can_be_read(cls, value: str | None) -> str | None:
        if value is not None:
            parse_jump(value)
        return value

    @model_validator(mode="after")
    def _gpus_go_round(self) -> "Host":
        if self.gpus and self.gpus < self.slots:
            raise ValueError(f"gpus ({self.gpus}) must be at least slots ({self.slots}): lower slots, or set gpus to 0")
        return self

    @property
    def gpus_per_slot(self) -> int:
        return self.gpus // self.slots

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The machines on the way, nearest first."""
        return parse_jump(self.proxy_jump) if self.proxy_jump else ()

    def ssh_command(self) -> str:
        """The ssh command line that reaches this host, for people."""
        words = ["ssh"]
        if self.proxy_jump:
            words += ["-J", self.proxy_jump]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.key is not None:
            words += ["-i", self.key]
        return shlex.join([*words, self.address if self.user is None else f"{self.user}@{self.address}"])


class _HostsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    hosts: Annotated[dict[str, Host], Field(min_length=1)]


def read_hosts(path: Path) -> dict[str, Host]:
    """Name -> host, as the file has them. `[defaults]` holds what all share; a host's own value wins.

    Raises BadInput: one line with the file, the setting, the limit and the remedy.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"hosts file {path} can't be read ({error.strerror}): name one, as in --on ssh:hosts.toml"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"hosts file {path} isn't TOML: {error}") from None
    shared = data.pop("defaults", {})
    hosts = data.get("hosts")
    if not isinstance(shared, dict):
        raise BadInput(f"hosts file {path}: defaults must be a table: write its keys below [defaults]")
    if not isinstance(hosts, dict) or not hosts:
        raise BadInput(f'hosts file {path} names no host: add [hosts.gpu1] with address = "203.0.113.7"')
    data["hosts"] = {name: _joined(shared, host) for name, host in hosts.items()}
    return check_hosts(data, f"hosts file {path}")


def check_hosts(data: Mapping[str, Any], where: str) -> dict[str, Host]:
    """Name -> host, of a table `hosts`. Raises BadInput, which begins with `where`."""
    for name in data["hosts"]:
        if not _NAME.fullmatch(name):
            raise BadInput(
                f"{where}: a host's name ({name}) must be lower-case letters, digits, dots and dashes, at "
                "most 63: the machine's own name goes into address"
            )
    try:
        return _HostsFile.model_validate(data).hosts
    except ValidationError as error:
        raise BadInput(f"{where}: {_sentence(error)}") from None


def _is_long(text: str) -> bool:
    return not text.isprintable() or len(text) > _MAX_TEXT


def _joined(shared: dict[str, Any], own: Any) -> Any:
    """A host's table over the shared one; `env` is joined, not replaced."""
    if not isinstance(own, dict):
        return own
    joined = {**shared, **own}
    if isinstance(shared.get("env"), dict) and isinstance(own.get("env"), dict):
        joined["env"] = {**shared["env"], **own["env"]}
    return joined


def _sentence(error: ValidationError) -> str:
    missing = next((mistake for mistake in error.errors() if mistake["type"] == "missing"), None)
    if missing is not None and len(error.errors()) == 1:
        *place, key = map(str, missing["loc"])
        return f"{'.'.join(place)} lacks {key}: add it there, or to [defaults]"
    return describe(_HostsFile, error)


def parse_jump(text: str) -> tuple[Hop, ...]:
    """The hops of a `proxy_jump`, nearest first. Raises ValueError, which says what one looks like."""
    hops = []
    parts = text.split(",")
    if len(parts) > _MAX_HOPS:
        raise ValueError(f"proxy_jump has {len(parts)} machines, and at most {_MAX_HOPS} are taken: name fewer")
    for part in parts:
        match = _HOP.fullmatch(part.strip())
        port = int(match["port"]) if match and match["port"] else None
        if match is None or (port is not None and not 1 <= port <= 65535):
            raise ValueError(f"proxy_jump ({text}) must be [user@]address[:port], several with commas: {part!r} isn't")
        hops.append(Hop(match["address"].strip("[]"), match["user"], port))
    return tuple(hops)


def fitting(hosts: Mapping[str, Host], resources: Resources, path: Path | str) -> dict[str, Host]:
    """The hosts on which a job can run at all. Raises BadInput, with what there is, when none can."""
    count = max(resources.gpu_count, 1 if resources.gpu else 0)
    of_kind = {name: host for name, host in hosts.items() if resources.gpu in (None, host.gpu)}
    if not of_kind:
        kinds = sorted({host.gpu for host in hosts.values() if host.gpu})
        near = difflib.get_close_matches(str(resources.gpu), kinds, n=3, cutoff=0.4) or kinds
        raise BadInput(
            f"no host in {path} has the GPU {resources.gpu}: "
            + (f"it knows {', '.join(near)}" if near else f'say gpu = "{resources.gpu}" at the hosts that do')
        )
    large = {name: host for name, host in of_kind.items() if host.gpus_per_slot >= count}
    if not large:
        most = max(of_kind, key=lambda name: of_kind[name].gpus_per_slot)
        raise BadInput(
            f"a site needs {count} GPUs, and the most that {path} offers a site is {of_kind[most].gpus_per_slot} "
            f"({most}: gpus = {of_kind[most].gpus}, slots = {of_kind[most].slots}): fewer slots, or another host"
        )
    return large


def by_preference(names: Iterable[str], job: str) -> list[str]:
    """Hosts in an order that is the job's own, the same on every machine (rendezvous hashing)."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{job}\0{name}".encode()).digest())


def choose(hosts: Mapping[str, Host], busy: Mapping[str, int], spec: JobSpec, had: Collection[str] = ()) -> str:
    """Where a new job goes: the host with the smallest share of its slots taken, ties in the job's own order.

    busy  unfinished jobs, running or waiting, of the hosts that answered; at least one
    had   hosts with the files of the site's earlier attempts: one of them with a free slot is taken first
    """
    order = by_preference([name for name in hosts if name in busy], spec.name)
    return min(
        order, key=lambda name: (name not in had or busy[name] >= hosts[name].slots, busy[name] / hosts[name].slots)
    )
