"""One connection to Modal, whose package is imported late: requests repeated while Modal is busy, errors made ours."""

import importlib.util
import itertools
import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from composer_prime.errors import BadInput, ComposerPrimeError, ExecutorError, JobUnknown

if TYPE_CHECKING:
    import modal

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Between the attempts of one request, on top of the client's own three quick ones; the last is repeated."""
PATIENCE_S = 60.0
"""No attempt begins later; a connection that can't be made takes the client a minute to give up."""
TOKEN_REMEDY = "run `modal token set`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"


def modal_package() -> Any:
    """The `modal` package; BadInput, with the extra that brings it, where it is missing."""
    try:
        import modal
    except ModuleNotFoundError as error:
        raise BadInput(
            f"--on modal needs a package that isn't installed ({error.name}): pip install 'composer-prime[modal]'"
        ) from error
    return modal


def require_token() -> None:
    """Raise BadInput when this machine has no login for Modal. Asks Modal nothing."""
    modal_package()
    from modal.config import config

    if not _token() and not config["oauth_refresh_token"]:
        raise BadInput(f"no token for Modal is set here: {TOKEN_REMEDY}")


def login_variables() -> dict[str, str]:
    """The variables by which another machine's client works in the same workspace and environment.

    Raises BadInput where this one is logged in by another way than a token.
    """
    modal_package()
    from modal.config import config

    if not (token := _token()):
        raise BadInput(f"no token for Modal is set here that could be handed over: {TOKEN_REMEDY}")
    found = {"MODAL_TOKEN_ID": token[0], "MODAL_TOKEN_SECRET": token[1], "MODAL_SERVER_URL": config["server_url"]}
    return found | ({"MODAL_ENVIRONMENT": environment_name()} if environment_name() else {})


def require_proxy_support() -> None:
    """Raise BadInput where a proxy leads to Modal and what the client needs for that isn't there.

    Left alone the client tries for a minute, and then says only that it can't connect.
    """
    modal_package()
    from modal.config import config

    server = urlsplit(config["server_url"].partition(",")[0])
    proxies = urllib.request.getproxies()
    name = next((name for name in (server.scheme, "all") if proxies.get(name)), None)
    if name is None or config["disable_api_proxy"] or urllib.request.proxy_bypass(server.hostname or ""):
        return
    if importlib.util.find_spec("python_socks") is None:
        raise BadInput(
            f"{name.upper()}_PROXY is set, and Modal's client needs a package for that which isn't installed "
            "(python_socks): pip install 'composer-prime[modal]', or set MODAL_DISABLE_API_PROXY=1"
        )


def environment_name() -> str:
    """The environment of the workspace that this process works in; "" for the workspace's default."""
    from modal.config import config

    return config["environment"] or ""


def _token() -> tuple[str, str] | None:
    from modal.config import config

    token_id, token_secret = config["token_id"], config["token_secret"]
    return (token_id, token_secret) if token_id and token_secret else None


class Connection:
    """A client of Modal, opened at its first use and shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: modal.Client | None = None

    @property
    def client(self) -> "modal.Client":
        """The open client. Raises BadInput where no token is configured, ExecutorError when Modal is out of reach."""
        modal = modal_package()
        with self._lock:
            if self._client is not None:
                return self._client
            require_proxy_support()
            try:
                if not (token := _token()):
                    # Another way to log in, or the reason why there is none. It is the process's: not ours to close.
                    return modal.Client.from_env()
                self._client = client = modal.Client.from_credentials(*token)
            except modal.exception.Error as error:
                raise explained(error, "connection to Modal") from error
            return client

    def ask(self, what: str, request: Callable[[], T]) -> T:
        """`request()`, repeated with growing pauses while Modal is busy or out of reach.

        what  names what is asked for in messages. Raises BadInput, JobUnknown and ExecutorError (see `explained`).
        """
        from grpclib.exceptions import StreamTerminatedError

        modal = modal_package()
        busy = _busy_errors()
        give_up_at = time.monotonic() + PATIENCE_S
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            try:
                return request()
            except (modal.exception.Error, StreamTerminatedError, OSError) as error:
                if not isinstance(error, busy) or time.monotonic() + pause_s > give_up_at:
                    raise explained(error, what) from error
                logger.info("modal what=%s error=%s pause_s=%s", what, type(error).__name__, pause_s)
            time.sleep(pause_s)
        raise AssertionError("unreachable")

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


def explained(error: Exception, what: str) -> ComposerPrimeError:
    """One of our errors for one of the client's; `what` was asked for."""
    known = modal_package().exception
    # The client's text may have lines; ours are one.
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, known.AuthError):
        return BadInput(f"Modal refuses the token ({text}): {TOKEN_REMEDY}")
    if isinstance(error, known.PermissionDeniedError):
        return BadInput(f"{what}: this Modal token may not do that ({text}): use one of a member of the workspace")
    if isinstance(error, known.VersionError):
        return BadInput(f"Modal no longer serves this client ({text}): pip install --upgrade 'composer-prime[modal]'")
    if isinstance(error, known.NotFoundError):
        return JobUnknown(f"{what}: Modal has no such thing ({text})")
    if isinstance(error, known.ImageBuildError):
        return BadInput(f"{what}: Modal can't build the image ({text}): check its name, and that it has a Python")
    if isinstance(error, known.InvalidError) and not isinstance(error, known.ConflictError):
        return BadInput(f"{what}: Modal refuses it ({text})")
    return ExecutorError(f"{what}: Modal failed ({type(error).__name__}: {text}); look at https://modal.com/apps")


def _busy_errors() -> tuple[type[Exception], ...]:
    from grpclib.exceptions import StreamTerminatedError

    known = modal_package().exception
    return (
        known.ResourceExhaustedError,
        known.ServiceError,
        known.InternalError,
        known.ConnectionError,
        StreamTerminatedError,
        OSError,
    )
