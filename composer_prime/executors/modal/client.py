"""One connection to Modal: requests repeated while Modal is busy, its client's errors made ours."""

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import modal
from grpclib.exceptions import StreamTerminatedError
from modal import exception
from modal.config import config

from composer_prime.errors import BadInput, ComposerPrimeError, JobUnknown
from composer_prime.executors.repeating import Busy, patiently

T = TypeVar("T")

TOKEN_REMEDY = "run `modal token set`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
FAILURES = (exception.Error, StreamTerminatedError, OSError)
"""Errors of the client for requests that failed."""
MENDABLE = {
    exception.AuthError: TOKEN_REMEDY,
    exception.PermissionDeniedError: "use a token of a member of the workspace",
    exception.VersionError: "pip install --upgrade modal",
    exception.ImageBuildError: "check the image's name, and that it has a Python",
    exception.InvalidError: "correct what it names",
}
"""Those that a person can mend, and how; any other may be gone later, after the client's own three quick repeats."""


def token() -> tuple[str, str]:
    """This machine's token for Modal, id and secret. Asks Modal nothing. Raises BadInput where there is none."""
    if not (config["token_id"] and config["token_secret"]):
        raise BadInput(f"no token for Modal is set here: {TOKEN_REMEDY}")
    return config["token_id"], config["token_secret"]


class Connection:
    """A client of Modal, opened at its first use and shared by threads."""

    @cached_property
    def client(self) -> modal.Client:
        """The open client. Raises BadInput where no token is set, ExecutorError when Modal is out of reach."""
        try:
            return modal.Client.from_credentials(*token())
        except FAILURES as error:
            raise explained(error, "connection to Modal") from error

    def ask(self, what: str, request: Callable[[], T]) -> T:
        """`request()`, repeated with growing pauses while Modal is busy or out of reach.

        what  names what is asked for in messages. Raises BadInput, JobUnknown and ExecutorError (see `explained`).
        """

        def once() -> T:
            try:
                return request()
            except FAILURES as error:
                raise explained(error, what) from error

        return patiently(once)

    def close(self) -> None:
        if client := vars(self).pop("client", None):
            client.close()


def explained(error: Exception, what: str) -> ComposerPrimeError:
    """One of our errors for one of the client's; `what` was asked for."""
    # The client's text may have lines; ours are one.
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, exception.NotFoundError | exception.OutputExpiredError):
        return JobUnknown(f"{what}: Modal has no such thing ({text})")
    for kind, remedy in MENDABLE.items():
        if isinstance(error, kind) and not isinstance(error, exception.ConflictError):
            return BadInput(f"{what}: Modal refuses it ({text}): {remedy}")
    return Busy(f"{what}: Modal failed ({type(error).__name__}: {text}); look at https://modal.com/apps")
