"""What our code says to who reads a trainer's output: its log, and the one line with which a trainer ends."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from composer_prime.errors import ComposerPrimeError, ConfigError, SiteError, SystemRefused
from composer_prime.visible import log_handler


def rank() -> int:
    """This process's rank, as every launcher of torch says it."""
    return int(os.environ.get("RANK", "0"))


def show_our_log() -> None:
    """Print what our code logs on the first rank, where upstream's logger doesn't take it."""
    ours = logging.getLogger("composer_prime")
    if rank() == 0 and not ours.hasHandlers():
        ours.addHandler(log_handler())
        ours.setLevel(logging.INFO)


@contextmanager
def ending_in_one_line(*, every_rank: bool = False) -> Iterator[None]:
    """End this rank with the error's exit code; its line is printed once, a lost rank's by each rank that noticed.

    every_rank  print it on each rank that gets here, since the others may not
    """
    try:
        yield
    except (ComposerPrimeError, OSError) as raised:
        error = raised if isinstance(raised, ComposerPrimeError) else SystemRefused.of(raised)
        if error is None:
            raise
        if every_rank or rank() == 0 or isinstance(error, SiteError):
            print(f"composer-prime: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


@contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """Raise ConfigError with the command that installs it where a package can't be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "composer_prime"):
            raise
        raise ConfigError(
            f"an outer run needs {package}, which isn't installed beside PRIME-RL: uv pip install {package}"
        ) from error
