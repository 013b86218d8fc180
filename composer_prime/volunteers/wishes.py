"""What a volunteer asks for: where, how much of the machine, and for how long."""

from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
KEY_VARIABLE = "COMPOSER_PRIME_KEY"
"""Where a gateway's client looks for the site's key file."""


@dataclass(frozen=True)
class Wishes:
    """What the volunteer asks for; None: no limit.

    folder                 None: `VolunteerFolder.default`
    key_file               of a key that the volunteer made
    mbit_up, mbit_down     Mbit/s that the site may use
    hours                  after which it leaves
    niceness               from 0 to 19: how far it steps back for other programs
    allow_envs, allow_harnesses, allow_teachers   packages and servers, by name, that an invitation may choose
    allow_local            whether it may lead to a folder or an address of this machine or its network
    use_my_aws             whether requests to the bucket are signed by what this machine's user has
    """

    folder: Path | None = None
    key_file: Path | None = None
    mbit_up: float | None = None
    mbit_down: float | None = None
    max_disk_gib: float | None = None
    hours: float | None = None
    niceness: int = 0
    allow_envs: tuple[str, ...] = ()
    allow_harnesses: tuple[str, ...] = ()
    allow_teachers: tuple[str, ...] = ()
    allow_local: bool = False
    use_my_aws: bool = False

    @property
    def max_disk_bytes(self) -> int | None:
        """What the site may put on the disk."""
        return None if self.max_disk_gib is None else int(self.max_disk_gib * GIB)
