"""What a process does while it is watched, by Python's own audit events: what it opens, starts, imports, and changes.

A hook can't be taken out again, so there is one, which looks only while somebody watches.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_prime.gateway.store import KEY_VARIABLE
from composer_prime.redaction import SECRET_NAMES_VARIABLE
from composer_prime.store.remote import ANONYMOUS_VARIABLE
from composer_prime.volunteers.invitation import CREDENTIALS, IDENTITY

NEVER = (
    "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.startfile", "os.kill", "pty.",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethost", "socket.getname", "socket.send", "ftplib.",
    "http.client.", "smtplib.", "urllib.", "webbrowser.", "ctypes.", "import", "exec", "compile", "shutil.", "code.",
    "pickle.", "marshal.load", "builtins.input", "signal.", "syslog.",
)  # fmt: skip
CHANGES = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.truncate", "os.link", "os.symlink",
    "os.utime", "os.setxattr", "tempfile.",
)  # fmt: skip
VARIABLES = {*CREDENTIALS, *IDENTITY, KEY_VARIABLE, SECRET_NAMES_VARIABLE, ANONYMOUS_VARIABLE}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Watch:
    folder: str | None = None
    """Where it may write; None: nobody watches."""
    readable: tuple[str, ...] = ()
    seen: list[str]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _Watch.folder is None:
        return
    if event == "open":
        _note_open(*args)
    elif event.startswith("shutil.rmtree") and _is_ours(args[0]):
        return  # of a folder for a key, whose files are counted below
    elif event.startswith(NEVER):
        _Watch.seen.append(f"{event} {args!r}"[:300])
    elif event.startswith(CHANGES):
        is_inside = len(args) > 1 and isinstance(args[-1], int) and args[-1] >= 0 and "/" not in str(args[0])
        if not is_inside and not all(_is_ours(arg) for arg in args if isinstance(arg, str | bytes | os.PathLike)):
            _Watch.seen.append(f"{event} {args!r}"[:300])
    elif event in ("os.putenv", "os.unsetenv") and os.fsdecode(args[0]) not in VARIABLES:
        _Watch.seen.append(f"{event} {args!r}"[:300])


def _note_open(path: Any, mode: Any, flags: Any) -> None:
    if isinstance(path, int) or path is None:
        return
    spelled = os.path.abspath(os.fsdecode(path))
    is_written = bool(flags & WRITES) if isinstance(flags, int) else "r" not in (mode or "r")
    if not _is_ours(path) and (is_written or not spelled.startswith(_Watch.readable)):
        _Watch.seen.append(f"open {spelled} {mode} {flags}"[:300])


def _is_ours(path: Any) -> bool:
    spelled = os.path.abspath(os.fsdecode(path))
    return _Watch.folder is not None and (spelled + "/").startswith(_Watch.folder)


def install() -> None:
    """Put the hook in, once a process."""
    if not hasattr(_Watch, "seen"):
        _Watch.seen = []
        packages = {str(Path(path)) for path in sys.path if path.endswith(("site-packages", ".zip"))}
        _Watch.readable = (str(Path(os.__file__).parent), *packages)
        sys.addaudithook(_hook)


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """What is done meanwhile and shouldn't be; only below `folder` may anything be written."""
    install()
    _Watch.seen, _Watch.folder = [], f"{folder}/"
    try:
        yield _Watch.seen
    finally:
        _Watch.folder = None
