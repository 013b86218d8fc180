"""Where the records of launches lie, in the bucket of the run that they are for (see `store.keys`)."""

import re

from composer_prime.config.table import SITE_NAME
from composer_prime.store.keys import check_site_name, fixed_number, short_sha

LAUNCH_DIGITS = 4
_LAUNCH = re.compile(r"launches/(\d{4})/launch\.json")
_INTENT = re.compile(rf"launches/(\d{{4}})/sites/({SITE_NAME})/(\d{{4}})/intent\.json")


def launches_prefix() -> str:
    """Prefix of everything about launches; they sort by number."""
    return "launches/"


def launch_prefix(number: int) -> str:
    """Prefix of all records of the `number`-th launch, from 1."""
    return f"{launches_prefix()}{fixed_number('launch', number, LAUNCH_DIGITS)}/"


def launch(number: int) -> str:
    """The create-once record that names the `number`-th launch on its platforms."""
    return f"{launch_prefix(number)}launch.json"


def stop(number: int, site: str | None = None, attempt: int | None = None) -> str:
    """The create-once record that a launch, one site of it or one attempt is to run no more, and why."""
    if site is None:
        return f"{launch_prefix(number)}stop.json"
    return f"{_site(number, site) if attempt is None else _attempt(number, site, attempt)}/stop.json"


def recipe(sha: str) -> str:
    """The recipe that a launch's sites run, addressed by the sha256 (64 hex digits) of its text."""
    return f"{launches_prefix()}recipes/{short_sha(sha)}.toml"


def order(sha: str) -> str:
    """What a supervisor that is a job is to do, addressed by its sha256 (64 hex digits)."""
    return f"{launches_prefix()}orders/{short_sha(sha)}.json"


def wheel(sha: str) -> str:
    """A wheel that a launch's jobs install, addressed by its sha256 (64 hex digits)."""
    return f"{launches_prefix()}wheels/{short_sha(sha)}.whl"


def _site(number: int, site: str) -> str:
    return f"{launch_prefix(number)}sites/{check_site_name(site)}"


def _attempt(number: int, site: str, attempt: int) -> str:
    return f"{_site(number, site)}/{fixed_number('attempt', attempt, LAUNCH_DIGITS)}"


def intent(number: int, site: str, attempt: int) -> str:
    """The create-once record that an attempt to run a site is to be started: written before money is spent."""
    return f"{_attempt(number, site, attempt)}/intent.json"


def job(number: int, site: str, attempt: int) -> str:
    """The create-once record of the platform's name for that attempt's job."""
    return f"{_attempt(number, site, attempt)}/job.json"


def end(number: int, site: str, attempt: int) -> str:
    """The create-once record of how that attempt ended, and what it cost."""
    return f"{_attempt(number, site, attempt)}/end.json"


def parse_launch(key: str) -> int | None:
    """The number of the launch whose record is at `key`; None for any other key."""
    match = _LAUNCH.fullmatch(key)
    return None if match is None else int(match[1])


def parse_intent(key: str) -> tuple[int, str, int] | None:
    """(launch, site, attempt) of an intent; None for any other key."""
    match = _INTENT.fullmatch(key)
    return None if match is None else (int(match[1]), match[2], int(match[3]))
