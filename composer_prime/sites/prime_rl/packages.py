"""Packages that an outer run needs and PRIME-RL's own installation may lack: imported late, and named if absent."""

from collections.abc import Iterator
from contextlib import contextmanager

from composer_prime.errors import ConfigError


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
