"""Who may ask HTTP servers of ours on this machine: whoever sends their token, and no web page.

A site's servers and clients share a token that its supervisor draws. A teacher that a person serves by hand takes the
token in the file of that user, which our clients send to teachers on this machine.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from composer_prime.errors import BadInput

SITE_TOKEN = "COMPOSER_PRIME_SITE_TOKEN"
"""The variable that holds a site's token in its processes."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
OPEN_PATH = "/health"
_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(32)


def site_token() -> str:
    """This process's site's; one is drawn where none was handed down, and children get it."""
    return os.environ.setdefault(SITE_TOKEN, new_token())


def user_token(environ: Mapping[str, str] = os.environ) -> str:
    """The token of teachers that this user serves, from a file of theirs (0600) that the first call makes.

    Raises BadInput when it can't be made.
    """
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = Path(base) / "composer-prime" / "token"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = path.with_name(f".token.{os.getpid()}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(new_token())
        try:
            os.link(beside, path)  # whole, and only once
        except FileExistsError:
            pass
        finally:
            beside.unlink()
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise BadInput(
            f"{path} can't hold the token of served teachers ({error.strerror}): set XDG_CONFIG_HOME"
        ) from error


def headers(token: str) -> dict[str, str]:
    """What a client sends."""
    return {"Authorization": f"Bearer {token}"}


def is_local(url: str) -> bool:
    """Whether an address is this machine's own."""
    return urlsplit(url).hostname in LOOPBACK


class OnlyWithToken:
    """ASGI: an app that answers who has the token, asks for a loopback Host, and is no web page; GET /health all."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (fault := self._fault(scope)) is not None:
            status, text = fault
            body = b'{"error": {"message": "%s", "code": %d}}' % (text.encode(), status)
            start = {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", b"application/json")],
            }
            await send(start)
            await send({"type": "http.response.body", "body": body})
        elif scope["type"] in ("http", "lifespan"):
            await self._app(scope, receive, send)

    def _fault(self, scope: Any) -> tuple[int, str] | None:
        sent: dict[bytes, bytes] = dict(scope["headers"])
        port, host = scope["server"][1], sent.get(b"host", b"").decode("latin-1").lower()
        if host.removesuffix(f":{port}") not in _HOSTS or (host in _HOSTS and port != 80) or b"origin" in sent:
            return 403, "this server answers programs on this machine, by its loopback address"
        if (scope["method"], scope["path"]) == ("GET", OPEN_PATH):
            return None
        if not secrets.compare_digest(sent.get(b"authorization", b""), self._expected):
            return 401, "this server wants its token: Authorization: Bearer TOKEN"
        return None
