"""The hosts of a launch over ssh, in the run's bucket: with them its jobs are reached from any machine.

What a hosts file says of its hosts is recorded before a job may be on one of them, but for what is a secret or means
something on one machine alone: no `env`, no keys, no paths of known_hosts or of ssh's configuration. A file that
changed gets a further record; of a host in several the newest counts, since a host's name stays while jobs run.

Whoever can write the bucket can write such a record. So it is checked as strictly as a hosts file, and it chooses
neither the keys, nor the configuration, nor the known_hosts that the ssh client here uses.
"""

import os
import stat
import time
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from pydantic import Field

from composer_prime.errors import BadInput, CorruptObject
from composer_prime.executors.open import PLATFORMS
from composer_prime.executors.ssh.hosts import Host, check_hosts
from composer_prime.launch.records import LaunchBook, Line, Seconds, Word, who
from composer_prime.store import launch_keys
from composer_prime.sync.canonical import Record
from composer_prime.sync.reading import find_record, read_record

RECORDED = ("address", "user", "port", "proxy_jump", "slots", "gpus", "gpu", "python", "workdir", "key")
"""Settings that are recorded. `key` is only a path, said where a login is refused: it is read on no other machine."""
MAX_HOSTS = 1000

Table = Mapping[str, str | int | None]


@runtime_checkable
class KnowsHosts(Protocol):
    """An executor whose jobs are on hosts that only its own file describes."""

    def hosts_elsewhere(self) -> dict[str, Host]:
        """The hosts as another machine reaches them."""
        ...


class Hosts(Record):
    """Hosts that a launch command may have given jobs to. on: as it named them."""

    on: Line
    hosts: dict[Word, dict[Word, Line | int | None]] = Field(min_length=1, max_length=MAX_HOSTS)
    created_at: Seconds
    created_by: Word


def keep_hosts(book: LaunchBook, on: str, hosts: Mapping[str, Host]) -> None:
    """Record a launch's hosts, unless its newest record of them says the same."""
    tables = {name: host.model_dump(include=set(RECORDED)) for name, host in hosts.items()}
    if len(tables) > MAX_HOSTS:
        raise BadInput(f"{on} names {len(tables)} hosts, and a launch records at most {MAX_HOSTS}: take some out")
    while True:
        newest = max(_versions(book), default=0)
        found = find_record(book.store, Hosts, launch_keys.hosts(book.launch.number, newest)) if newest else None
        if found is not None and (found.on, found.hosts) == (on, tables):
            return
        record = Hosts(on=on, hosts=tables, created_at=time.time(), created_by=who())
        if book.store.create(launch_keys.hosts(book.launch.number, newest + 1), record.to_bytes()):
            return


def hosts_to_use(book: LaunchBook, on: str) -> dict[str, Host] | None:
    """The hosts that the bucket records for jobs started `on` a hosts file; None where the file itself is to be read:
    it is here, or nothing was recorded. Other launch commands' hosts come in where theirs don't have the name.

    Raises BadInput for a record that isn't sound, and where nothing but another user's file is there.
    """
    name, _, file = on.partition(":")
    if name not in PLATFORMS or not PLATFORMS[name].takes_file or _is_own(file):
        return None
    found: dict[str, Host] = {}
    records = [_read(book, version) for version in sorted(_versions(book))]
    for record in sorted(records, key=lambda record: record.on == on):
        found |= _checked(record, book)
    if not found and os.path.lexists(file):
        raise BadInput(
            f"hosts file {file} is named by the bucket and isn't yours alone to write, or can't be read: give it by "
            f"--on ssh:{file} if you trust it"
        )
    return found or None


def _is_own(file: str) -> bool:
    """Whether a readable file is there that the user or root owns, and that not everybody may write.

    `file` is a word of the bucket, and a neighbour could have put one there by which the ssh client runs programs.
    """
    try:
        there = os.stat(file)
    except (OSError, ValueError):
        return False
    own = there.st_uid in (0, os.geteuid()) and not there.st_mode & stat.S_IWOTH
    return own and stat.S_ISREG(there.st_mode) and os.access(file, os.R_OK)


def _versions(book: LaunchBook) -> list[int]:
    keys = book.store.list(launch_keys.hosts_prefix(book.launch.number))
    return [version for key in keys if (version := launch_keys.parse_hosts(key)) is not None]


def _read(book: LaunchBook, version: int) -> Hosts:
    try:
        return read_record(book.store, Hosts, launch_keys.hosts(book.launch.number, version))
    except CorruptObject as error:
        raise _unsound(book, str(error)) from None


def _checked(record: Hosts, book: LaunchBook) -> dict[str, Host]:
    for name, table in record.hosts.items():
        strange = sorted(table.keys() - set(RECORDED))
        if strange:
            raise _unsound(book, f"host {name} has {strange[0]}, which isn't taken from a bucket")
    try:
        return check_hosts({"hosts": {name: dict(table) for name, table in record.hosts.items()}}, "hosts")
    except BadInput as error:
        raise _unsound(book, str(error)) from None


def _unsound(book: LaunchBook, why: str) -> BadInput:
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in why[:400])
    return BadInput(
        f"the hosts that {book.store.uri} records for launch {book.name} aren't used: {shown}. Give a hosts file of "
        "your own by --on ssh:FILE"
    )
